# SPDX-License-Identifier: Apache-2.0
"""The results of the zoo: what benchmarks/zoo.py keeps of runs, and the page that it makes."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import zoo

from torchbeast.errors import UsageError
from torchbeast.reporting.estimates import Estimate
from torchbeast.zoo import PRESETS

NAME = next(name for name, preset in PRESETS.items() if preset.seeds)
LOGS = """# _tick,_time,step,mean_episode_return,episodes,evaluation_mean_return
0,60,100,1,1,
1,120,200,,1,
2,180,300,4,3,7
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results and runs in an empty folder, and a machine that is called here."""
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(zoo, "RECORDS", tmp_path / "records.json")
    monkeypatch.setattr(zoo, "machine", lambda: "here")
    monkeypatch.setattr(zoo, "agent_of", lambda run, name: {"seed": run.name})
    return tmp_path


def add_run(folder: Path, seed: int, score: float, day: int = 1, **settings: Any) -> Path:
    """Writes a run that has ended with an evaluation; day: of its end."""
    run = folder / NAME / f"seed={seed}"
    run.mkdir(parents=True, exist_ok=True)
    meta = {
        "args": {"total_steps": 300, "seed": seed, "algo": "ppo", "env": "Catch", **settings},
        "argv": ["monobeast", "--preset", NAME, f"--seed={seed}"],
        "git": {"commit": "0123456789abcdef", "is_dirty": False},
        "date_start": "1970-01-01T00:00:00+00:00",
        "date_end": f"2026-11-{day:02}T00:00:00+00:00",
        "earlier_parts": [],
        "successful": True,
    }
    (run / "meta.json").write_text(json.dumps(meta))
    (run / "logs.csv").write_text(LOGS)
    columns = "_time,step,num_episodes,mean_episode_return"
    (run / "evaluations.csv").write_text(f"{columns}\n180,300,100,{score}\n")
    return run


def kept() -> zoo.Kept:
    return zoo.read(zoo.FOLDER / f"{NAME}.csv")


def test_the_page_of_the_zoo_is_made_from_the_kept_runs() -> None:
    page = zoo.Page(zoo.all_kept()).text()
    assert page == zoo.PAGE.read_text(encoding="utf-8"), "run benchmarks/zoo.py page"
    assert all(name in page for name, preset in PRESETS.items() if preset.seeds)


def test_the_records_of_the_package_are_those_of_the_kept_runs() -> None:
    records = json.loads(zoo.RECORDS.read_text()) if zoo.RECORDS.exists() else {}
    found = {name: {**record, "agent": None} for name, record in records.items()}
    made = {name: {**zoo.record_of(each), "agent": None} for name, each in zoo.all_kept().items()}
    assert found == made


def test_the_published_figure_of_every_preset_exists() -> None:
    page = zoo.Page({})
    assert sum(len(page.theirs(name)) for name in PRESETS) > 0


def test_a_kept_run_has_its_curve_and_where_it_comes_from(places: Path) -> None:
    add_run(places, 101, 7.5)
    zoo.keep(places / NAME)
    first, second, end = kept().runs[101]
    assert [first["mean_return"], second["mean_return"], end["mean_return"]] == ["1.0", "", "4.0"]
    assert (end["greedy_return"], end["commit"], end["machine"]) == ("7.5", "0123456789", "here")
    assert kept().command == f"python -m torchbeast.monobeast --preset {NAME} --seed=SEED"
    record = json.loads(zoo.RECORDS.read_text())[NAME]
    assert record["interval"] == [7.5, 7.5]
    assert record["agent"] == {"seed": "seed=101"}


def test_seeds_of_other_machines_stay_and_a_newer_run_replaces_the_older_one(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (101, 102):
        add_run(places / "there", seed, 1.0)
    zoo.keep(places / "there" / NAME)
    monkeypatch.setattr(zoo, "machine", lambda: "elsewhere")
    add_run(places, 102, 2.0, day=2)
    add_run(places, 103, 3.0)
    zoo.keep(places / NAME)
    once = (zoo.FOLDER / f"{NAME}.csv").read_text()
    zoo.keep(places / "there" / NAME)
    assert (zoo.FOLDER / f"{NAME}.csv").read_text() == once
    assert list(kept().scores) == [1.0, 2.0, 3.0]
    assert [end["machine"] for end in kept().ends] == ["here", "elsewhere", "elsewhere"]


def test_a_run_that_has_not_ended_is_not_kept(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_run(places, 101, 1.0)
    add_run(places, 102, 1.0, total_steps=301)
    zoo.keep(places / NAME)
    assert list(kept().runs) == [101]
    assert "Skipping" in capsys.readouterr().out


def test_runs_with_other_settings_are_refused(places: Path) -> None:
    add_run(places, 101, 1.0, learning_rate=0.1)
    zoo.keep(places / NAME)
    add_run(places, 102, 1.0, learning_rate=0.2)
    with pytest.raises(UsageError, match=r"has learning_rate 0.1, and the new run 0.2"):
        zoo.keep(places / NAME)
    assert list(kept().runs) == [101]


def test_minutes_of_training_do_not_count_evaluations_and_pauses() -> None:
    rows: list[dict[str, float]] = [
        {"_time": 60},
        {"_time": 120},
        {"_time": 900},
        {"_time": 960},
        {"_time": 2000, "evaluation_mean_return": 1},
    ]
    resumed = datetime.fromtimestamp(800, timezone.utc)
    assert zoo.minutes_of(rows, [resumed]) == [1, 2, 3, 4, 5]


def test_the_interval_of_a_published_mean_is_that_of_its_published_scores() -> None:
    figures = [figure for figure in zoo.published().values() if figure.scores.size]
    assert len(figures) > 10
    for figure in figures:
        half = 2.262 * figure.scores.std(ddof=1) / len(figure.scores) ** 0.5
        rounded = 2.262 * 0.05 / (len(figure.scores) - 1) ** 0.5  # the published deviation
        assert figure.half == pytest.approx(half, abs=rounded)


def test_figures_of_one_page_with_different_notes_are_cited_with_their_notes() -> None:
    kept = next(iter(zoo.all_kept().values()))
    page = zoo.Page({})
    figure = next(iter(zoo.published().values()))
    others = [figure, figure._replace(note="sampled"), figure._replace(note="sampled")]
    cited = [page._compared(kept, each)[1] for each in others]
    assert "][1]" in cited[0]
    assert "][2]" in cited[1] and cited[1] == cited[2]


@pytest.mark.parametrize(
    ("low", "high", "theirs", "expected"),
    [
        (101, 110, 1, "above"),
        (99, 100, 1, "inside"),
        (80, 99, 1, "below"),
        (101, 110, 3, "inside"),
        (100 + 4.31, 110, 3, "above"),
        (80, 100 - 4.31, 3, "below"),
    ],
)
def test_a_score_is_compared_with_the_interval_of_the_published_mean(
    low: float, high: float, theirs: int, expected: str
) -> None:
    half = zoo.half_interval(2**0.5, theirs)
    figure = next(iter(zoo.published().values()))._replace(mean=100, half=half)
    ours = Estimate((low + high) / 2, low, high)
    assert zoo.verdict(ours, figure, runs=3) == expected
    assert zoo.verdict(ours, figure, runs=2) == "too few"
