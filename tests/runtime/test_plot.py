# SPDX-License-Identifier: Apache-2.0
"""Curves are drawn from logs.csv; a folder without one is a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchbeast import plot
from torchbeast.runtime.errors import UsageError
from torchbeast.runtime.log_files import LogFiles


def write_run(folder: Path, returns: list[float]) -> Path:
    folder.mkdir()
    files = LogFiles(folder)
    for i, value in enumerate(returns):
        files.write(10 * (i + 1), {"mean_episode_return": value})
    files.close()
    return folder


def test_a_curve_is_the_mean_of_the_last_updates_in_which_episodes_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0, float("nan"), 3.0])
    assert plot.curve(run) == [(10.0, 1.0), (30.0, 2.0)]


def test_a_folder_without_a_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has no logs"):
        plot.curve(tmp_path)


def test_a_run_in_which_no_episode_ended_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no episode has ended"):
        plot.curve(write_run(tmp_path / "a", [float("nan")]))


def test_no_run_at_all_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main([]) == 2
    assert "plot: " in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main([str(write_run(tmp_path / "a", [1.0]))]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_png_of_several_runs_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(write_run(tmp_path / name, [1.0, 2.0])) for name in "ab"]
    assert plot.main([*runs, "--output", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
