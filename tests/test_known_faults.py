# SPDX-License-Identifier: Apache-2.0
"""Every fault in known-faults.md, machines.md and operations.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "contributing" / "known-faults.md"


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        ("contributing/known-faults.md", 50),
        ("how-to/machines.md", 10),
        ("how-to/operations.md", 25),
    ],
)
def test_every_test_named_in_the_document_exists(page: str, at_least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (DOCS / page).read_text(encoding="utf-8"))
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


def test_every_fault_of_operations_names_a_test() -> None:
    text = (
        (DOCS / "how-to" / "operations.md")
        .read_text(encoding="utf-8")
        .partition("\n## Checkpoints")[0]
    )
    tables = [table for table in text.split("\n\n") if table.startswith("| fault |")]
    faults = [row for table in tables for row in table.strip().splitlines()[2:]]
    assert len(faults) > 25
    assert all("::test_" in row.rsplit("|", 2)[1] for row in faults)
