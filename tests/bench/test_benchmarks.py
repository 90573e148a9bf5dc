# SPDX-License-Identifier: Apache-2.0
"""Every program in benchmarks/ still finds what it imports, and answers --help."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
NEED_COMPILED = ("transport",)
NEED_MORE = ("sample_factory_atari",)  # runs in a virtual environment of its own
PROGRAMS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if "argparse.ArgumentParser" in path.read_text() and path.stem not in NEED_MORE
)


def test_there_are_benchmarks() -> None:
    assert {"compute", "ideal", "programs", "sample_factory", "transport"} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_answers_help(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if program in NEED_COMPILED:
        pytest.importorskip("libtorchbeast._C")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / f"{program}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"usage: {program}.py" in capsys.readouterr().out


def test_sample_factory_is_compared_over_windows_of_many_of_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its counter moves by a batch: of 25 s and eight batches one more is an eighth."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["sample_factory.py"])
    arguments = runpy.run_path(str(FOLDER / "sample_factory.py"))["_arguments"]()
    assert arguments.seconds >= 70
