# SPDX-License-Identifier: Apache-2.0
"""Every fault that the docs promise to survive names tests that exist.

known-faults.md names them itself; tested-faults.md names those of the how-to pages, row by row.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "contributing" / "known-faults.md"
TESTED = DOCS / "contributing" / "tested-faults.md"


@pytest.mark.parametrize(("page", "at_least"), [(PAGE, 50), (TESTED, 90)])
def test_every_test_named_in_the_document_exists(page: Path, at_least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    assert len(named) > at_least
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert not missing


def test_every_fault_names_a_test() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("## Open")[0]
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    faults = [row for row in rows if not row.startswith(("| fault |", "| ---"))]
    assert len(faults) > 30
    assert all("::test_" in row.rsplit("|", 2)[1] for row in faults)


@pytest.mark.parametrize(("name", "at_least"), [("machines.md", 45), ("operations.md", 40)])
def test_every_row_of_faults_and_limits_in_a_page_names_a_test(name: str, at_least: int) -> None:
    text = TESTED.read_text(encoding="utf-8")
    tested = first_cells(text.partition(f"## {name}\n")[2].partition("\n## ")[0], "row")
    page = (DOCS / "how-to" / name).read_text(encoding="utf-8")
    promised = first_cells(page, "fault", "limit", "what happens")
    assert tested.keys() == promised.keys()
    assert len(promised) > at_least
    assert all(re.search(r"`[^`]+(::test_|Test\.)\w+`", row) for row in tested.values())


def first_cells(text: str, *heads: str) -> dict[str, str]:
    """Returns the rows of all tables whose first head is one of these, by their first cell."""
    tables = [table.strip().splitlines() for table in text.split("\n\n")]
    rows = [
        row
        for head, *rest in tables
        if head.startswith(tuple(f"| {name} |" for name in heads))
        for row in rest[1:]
    ]
    return {row.split(" | ")[0]: row for row in rows}
