# SPDX-License-Identifier: Apache-2.0
"""Every fault that the docs promise to survive names tests that exist.

tested-faults.md says how runs behave when something fails, and lists faults of the past.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "contributing" / "tested-faults.md").read_text(encoding="utf-8")
HEAD = re.compile(r"\| (fault|limit) \|")
LISTS = ("When it does not connect", "Faults of the past")
TEST = re.compile(r"`[^`]+(::test_|Test\.)\w+`")


def test_every_test_named_in_the_document_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 200
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert not missing


def test_every_row_of_faults_and_limits_names_a_test() -> None:
    tables = [block for block in PAGE.split("\n\n") if HEAD.match(block)]
    rows = [row for table in tables for row in table.strip().splitlines()[2:]]
    assert len(rows) > 80
    assert [row for row in rows if not TEST.search(row.rsplit("|", 2)[1])] == []


def test_every_listed_fault_names_a_test() -> None:
    sections = [PAGE.partition(f"## {name}\n")[2].partition("\n## ")[0] for name in LISTS]
    faults = [line for text in sections for line in text.splitlines() if line.startswith("* ")]
    assert len(faults) > 60
    assert [fault for fault in faults if not TEST.search(fault)] == []
