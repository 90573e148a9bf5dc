# SPDX-License-Identifier: Apache-2.0
"""Every fault that the docs promise to survive names tests that exist.

known-faults.md lists faults of the past, and tested-faults.md how runs behave when something fails.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "contributing" / "known-faults.md"
TESTED = DOCS / "contributing" / "tested-faults.md"
HEAD = re.compile(r"\| (fault|limit|what happens) \|")


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


def test_every_row_of_faults_and_limits_names_a_test() -> None:
    tables = TESTED.read_text(encoding="utf-8").split("\n\n")
    rows = [row for table in tables if HEAD.match(table) for row in table.strip().splitlines()[2:]]
    assert len(rows) > 100
    assert all(re.search(r"`[^`]+(::test_|Test\.)\w+`", row.rsplit("|", 2)[1]) for row in rows)
