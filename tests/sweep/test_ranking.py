# SPDX-License-Identifier: Apache-2.0
"""The order of settings, and the table of agents."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from sweeping import agent, finish, log

from torchbeast.sweep.table import AgentRow, Board, as_csv, median, ranked, report


def row(folder: Path, mean: float, total_steps: int = 100, **settings: str) -> AgentRow:
    made = agent(folder, total_steps, **settings)
    log(made.folder, [(100, 10, mean)])
    finish(made.folder)
    return AgentRow(made)


def failed(folder: Path, step: int, mean: float, **settings: str) -> AgentRow:
    made = agent(folder, **settings)
    log(made.folder, [(step, 10, mean)])
    found = AgentRow(made)
    found.report = {"why": "ValueError: why"}
    found.end()
    return found


def test_settings_are_ranked_by_the_median_over_their_seeds(tmp_path: Path) -> None:
    returns = {"a": [0.0, 9.0, 1.0], "b": [2.0, 3.0, 2.5], "c": [math.nan, 4.0, 6.0]}
    rows = [
        row(tmp_path, mean, env=env, seed=str(seed))
        for env, means in returns.items()
        for seed, mean in enumerate(means)
    ]
    ranking = ranked(rows)
    assert [group[0].agent.settings["env"] for group in ranking] == ["c", "b", "a"]
    assert [median(group).mean_return for group in ranking] == [4.0, 2.5, 1.0], "no episode: worst"


def test_an_agent_that_failed_is_never_better_than_one_that_is_done(tmp_path: Path) -> None:
    rows = [
        failed(tmp_path, 20, 9.0, env="early"),
        failed(tmp_path, 60, 1.0, env="late"),
        row(tmp_path, -5.0, env="done"),
        row(tmp_path, math.nan, env="without an episode"),
    ]
    names = [group[0].agent.settings["env"] for group in ranked(rows)]
    assert names == ["done", "without an episode", "late", "early"]


@pytest.mark.parametrize(
    ("finished", "steps", "expected"),
    [
        ([3.0, 5.0], [20], "3"),  # the failed one counts as worse than 3
        ([3.0], [20, 40], "9 at step 40"),
        ([3.0], [20], "9 at step 20"),  # of the two in the middle the worse one
        ([3.0, 5.0, 6.0], [20], "3"),
    ],
)
def test_the_median_of_settings_counts_the_agents_that_failed(
    finished: list[float], steps: list[int], expected: str, tmp_path: Path
) -> None:
    rows = [row(tmp_path, mean, seed=f"done-{mean}") for mean in finished]
    rows += [failed(tmp_path, step, 9.0, seed=f"failed-{step}") for step in steps]
    (group,) = ranked(rows)
    assert str(median(group)) == expected


def test_settings_without_an_episode_come_last(tmp_path: Path) -> None:
    rows = [row(tmp_path, math.nan, env="a"), row(tmp_path, -5.0, env="b")]
    assert [group[0].agent.settings["env"] for group in ranked(rows)] == ["b", "a"]


def test_the_csv_has_every_agent_with_its_rank(tmp_path: Path) -> None:
    rows = [row(tmp_path, 1.0, seed="1", env="a,b"), row(tmp_path, 2.0, seed="1", env="c")]
    rows[0].report = {"why": "Traceback:\n  line\nValueError: why\nSee out.log for details"}
    rows[0].end()
    first, second = csv.DictReader(io.StringIO(as_csv(ranked(rows))))
    assert (first["rank"], first["env"], first["mean_return"]) == ("1", "c", "2.0")
    assert (second["rank"], second["env"], second["state"]) == ("2", "a,b", "failed")
    assert second["why"] == "ValueError: why" and second["step"] == second["total_steps"] == "100"


def test_the_report_says_which_agents_are_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(tmp_path, 1.0, seed="1"), row(tmp_path, 2.0, seed="2")]
    report([*rows, failed(tmp_path, 20, 9.0, seed="3")], tmp_path)
    said = capsys.readouterr().out
    assert "9 at step 20 (failed), 1, 2" in said and "2 done, 1 failed" in said
    assert "Unfinished agents are ranked last, by steps." in said


def test_a_report_without_any_episode_has_no_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report([AgentRow(agent(tmp_path, seed="1"))], tmp_path)
    assert "1 waiting" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]


KILLED = "process 7 was killed by SIGSEGV"
ERROR = "ValueError: no"


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        (KILLED, KILLED),
        (f"{KILLED}; last output:\n  all is well", KILLED),
        (f"worker 0: {KILLED}; last output:\n  all is well", f"worker 0: {KILLED}"),
        (f"process 7 exited with code 1; last output:\n  Traceback\n  {ERROR}", ERROR),
        (f"Traceback:\n  line\n{ERROR}\nSee out.log for details", ERROR),
        ("", ""),
    ],
)
def test_the_reason_of_an_agent_is_its_error_or_the_signal_that_killed_it(
    tmp_path: Path, why: str, reason: str
) -> None:
    found = AgentRow(agent(tmp_path, seed="1"))
    found.report = {"why": why}
    found.end()
    assert found.reason == reason


def test_an_agents_earlier_part_decides_its_first_state(tmp_path: Path) -> None:
    assert row(tmp_path, 1.0, env="a").state == "done"
    assert row(tmp_path, 1.0, total_steps=200, env="b").state == "waiting"
    assert AgentRow(agent(tmp_path, env="c")).state == "waiting"


def test_without_a_terminal_a_line_tells_each_change_and_sometimes_the_figures(
    tmp_path: Path,
) -> None:
    made, stream = AgentRow(agent(tmp_path, total_steps=300, seed="1")), io.StringIO()
    other = AgentRow(agent(tmp_path, seed="2"))
    with Board("two agents", [made, other], stream) as board:
        board.show(now=0.0)
        assert stream.getvalue() == ""
        made.begin()
        board.show(now=1.0)
        board.show(now=2.0)
        assert stream.getvalue() == "seed=1: running  steps 0\n"
        log(made.agent.folder, [(100, 10, 0.5)])
        made.follow(now=30.0)
        board.show(now=31.0)
        made.report = {}
        made.end()
        board.show(now=32.0)
    lines = stream.getvalue().splitlines()[1:]
    assert lines == [
        "seed=1: running  mean return 0.5  steps 100  steps/s 0",
        "seed=1: stopped  mean return 0.5  steps 100",
    ]


def test_brackets_in_the_name_of_a_sweep_are_shown(tmp_path: Path) -> None:
    board = Board("lr[a]: 1 run", [AgentRow(agent(tmp_path, seed="1"))], io.StringIO())
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as shown:
        console.print(board._table(20))
    assert "lr[a]: 1 run" in shown.get()
