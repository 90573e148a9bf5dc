# SPDX-License-Identifier: Apache-2.0
"""`--no-skips`: what a workflow asks for cannot be left out without a word."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import warm

TESTS = """
import pytest

@pytest.mark.skip(reason="no network")
def test_marked(): pass

def test_within(): pytest.skip("no disk")

@pytest.mark.xfail
def test_expected(): assert False

def test_run(): pass
"""


def test_a_skip_fails_with_its_reason_where_none_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rsfE"]
    tests = Path(__file__).parent
    folders = [str(tests), str(tests / "support"), os.environ.get("PYTHONPATH", "")]
    with warm.Popen(
        [*words, "--no-skips", "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=warm.PIPE,
        text=True,
    ) as process:
        said, _ = process.communicate(timeout=120)
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in said, said
    assert process.returncode == 1
    for reason in ("no network", "no disk"):
        assert reason in said, said
