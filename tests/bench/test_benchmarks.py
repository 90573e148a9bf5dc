# SPDX-License-Identifier: Apache-2.0
"""Every program in benchmarks/ finds its imports and answers --help."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

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
    assert {
        "compute",
        "programs",
        "reference_loop",
        "sample_factory",
        "streams",
        "transport",
    } <= set(PROGRAMS)


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
    """Its counter moves by whole batches: in 25 s, about eight of them, one more is an eighth."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["sample_factory.py"])
    arguments = runpy.run_path(str(FOLDER / "sample_factory.py"))["_arguments"]()
    assert arguments.seconds >= 70


META = {
    "args": {"entropy_cost": 0.01, "unroll_length": 20, "batch_size": 8},
    "argv": ["/x/torchbeast/polybeast.py", "--savedir", "/x", "--xpid=a", "--preset", "pong"],
    "git": {"commit": "abc", "is_dirty": True},
    "date_start": "2026-01-01",
    "date_end": "2026-01-02",
}
LOGS = """# _tick,_time,step,mean_episode_return,episodes,entropy_loss,grad_norm,mean_lag,entropy
0,100,160,,0,-1.6,3,0,
1,101,320,1,3,-1.6,5,1,
2,102,480,5,4,,,2,0.5
"""


@pytest.fixture
def keep_results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "keep_results.py"))


def test_a_kept_curve_says_what_made_it_and_counts_each_game_once(
    tmp_path: Path, keep_results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(keep_results["write_thinned"].__globals__, "ROWS", 1)
    (tmp_path / "meta.json").write_text(json.dumps(META))
    (tmp_path / "logs.csv").write_text(LOGS)
    keep_results["write_thinned"](tmp_path, tmp_path / "polybeast-11.csv")
    *said, columns, row = (tmp_path / "polybeast-11.csv").read_text().splitlines()
    assert said == [
        "# commit abc with changes that were not committed",
        "# date 2026-01-01 to 2026-01-02",
        "# command python -m torchbeast.polybeast --preset pong",
    ]
    found = dict(zip(columns.split(","), row.split(","), strict=True))
    assert (found["step"], found["seconds"], found["episodes"]) == ("480", "2.0", "4")
    assert float(found["mean_episode_return"]) == 2.0, "(3 * 1 + 1 * 5) / 4"
    entropies = [1.6 / (0.01 * 20 * 8)] * 2 + [0.5]
    assert float(found["entropy"]) == pytest.approx(sum(entropies) / 3, rel=1e-3)
    assert (float(found["grad_norm"]), float(found["mean_lag"])) == (4.0, 1.0)


def test_the_table_has_greedy_and_sampled_play(
    tmp_path: Path, keep_results: dict[str, Any]
) -> None:
    folder = tmp_path / "pong-polybeast-11"
    folder.mkdir()
    (folder / "logs.csv").write_text(LOGS)
    for name, mean in (("evaluation", 20), ("evaluation-sampled", -3.5)):
        (folder / f"{name}.txt").write_text(f"Returns: 1\nMean {mean:.2f}, median 0.00\n")
    line = keep_results["table_line"]("pong", "polybeast", [folder])
    assert line == "| [pong](pong/curve.png) | polybeast | 11 | 480 | 0.0 | 20 | -3.5 |"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The program, which writes a copy of its page."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found = runpy.run_path(str(FOLDER / "families.py"))["main"].__globals__
    page = tmp_path / "environments.md"
    page.write_text(found["PAGE"].read_text())
    monkeypatch.setitem(found, "PAGE", page)
    return found


def test_the_page_of_environments_is_what_its_program_writes(
    families: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = families["PAGE"].read_text()
    monkeypatch.setattr(sys, "argv", ["families.py", "--only", "^$"])
    families["main"]()
    assert families["PAGE"].read_text() == before


def test_families_are_chosen_in_any_case(
    families: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families, "_run", lambda family, seconds: "1 → 2")
    monkeypatch.setattr(sys, "argv", ["families.py", "--only", "cartpole"])
    families["main"]()
    assert "| `CartPole-v1` |  | 1 → 2 |" in families["PAGE"].read_text()


def test_environments_of_families_are_found_by_the_program_that_trains(
    families: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert families["_output"]([sys.executable, "-c", "import families"], tmp_path, 0.0) == ""
