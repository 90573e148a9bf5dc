# SPDX-License-Identifier: Apache-2.0
"""Figures of an agent from the files of its run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from sweeping import agent, finish, log

from torchbeast.reporting.log_files import LogFollower, RunProgress
from torchbeast.run.episodes import Episodes
from torchbeast.run.periodic import Scores
from torchbeast.sweep.table import AgentRow

NAN = math.nan


def test_a_mean_is_over_the_last_episodes_each_with_the_same_weight(tmp_path: Path) -> None:
    log(tmp_path, [(10, 2, 100.0), (20, 3, 1.0), (30, 6, 5.0)])
    mean = LogFollower(tmp_path, 4).read().mean_return
    assert mean == (1.0 + 3 * 5.0) / 4, "the first batch is not among the last four"


def test_the_mean_that_a_run_logs_is_its_score(tmp_path: Path) -> None:
    """Which episodes of a batch are among the last four cannot be read from the batch's mean."""
    log(tmp_path, [(10, 3, 1.0), (20, 6, 5.0)], mean_return=4.5)
    assert LogFollower(tmp_path, 4).read().mean_return == 4.5


def test_episodes_that_other_weights_played_do_not_count(tmp_path: Path) -> None:
    """Nor does the mean that the run logs, until all of its episodes are newer."""
    batches = [(10, 5, 9.0), (20, 8, 1.0), (30, 10, 3.0)]
    log(tmp_path, batches, mean_return=7.0)
    assert LogFollower(tmp_path, 100, after=10).read().mean_return == (1.0 + 2 * 3.0) / 3
    assert LogFollower(tmp_path, 2, after=10).read().mean_return == 7.0
    assert math.isnan(LogFollower(tmp_path, 100, after=30).read().mean_return)


def test_rows_are_read_as_they_are_written(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path, 100)
    assert follower.read() == (0, 0, pytest.approx(NAN, nan_ok=True)), "there is no file yet"
    log(tmp_path, [(10, 0, NAN)])
    assert follower.read()[:2] == (10, 0) and math.isnan(follower.progress.mean_return)
    log(tmp_path, [(20, 2, 1.0), (30, 2, NAN), (40, 5, 6.0)])
    assert follower.read() == RunProgress(40, 5, (2 * 1.0 + 3 * 6.0) / 5)
    assert follower.read() == follower.progress


@pytest.mark.parametrize(("damage", "step"), [(b"0" * 200_000, 10), (b"\xff", 0)])
def test_damaged_names_of_columns_do_not_end_a_sweep(
    tmp_path: Path, damage: bytes, step: int
) -> None:
    log(tmp_path, [(10, 1, 1.0)])
    (tmp_path / "fields.csv").write_bytes(damage)
    assert LogFollower(tmp_path, 100).read().step == step


@pytest.mark.parametrize("more", [1, 5])
def test_rows_that_a_resumed_agent_drops_do_not_count(tmp_path: Path, more: int) -> None:
    """The file is shorter than before, or again as long."""
    log(tmp_path, [(10, 1, 1.0), (20, 2, 50.0), (30, 3, 50.0)])
    follower = LogFollower(tmp_path, 100)
    assert follower.read().mean_return == pytest.approx(101 / 3)
    log(tmp_path, [(20 + i, 2 + i, 3.0) for i in range(more)], resumed_at=10)
    assert follower.read() == RunProgress(19 + more, 1 + more, (1.0 + 3.0 * more) / (1 + more))


def test_an_agent_is_complete_once_its_run_has_ended_well(tmp_path: Path) -> None:
    one, longer = agent(tmp_path, seed="1"), agent(tmp_path, 101, seed="1")
    log(one.folder, [(100, 1, 0.0)])
    assert AgentRow(one).state == "waiting", "it may have been killed before its checkpoint"
    finish(one.folder, successful=False)
    assert AgentRow(one).state == "waiting"
    finish(one.folder)
    assert AgentRow(one).state == "done" and AgentRow(longer).state == "waiting"


def test_an_agent_that_is_evaluated_is_complete_with_its_last_evaluation(tmp_path: Path) -> None:
    one = dataclasses.replace(agent(tmp_path, seed="1"), evaluates=True)
    log(one.folder, [(50, 1, 0.0), (100, 2, 0.0)])
    finish(one.folder)
    assert AgentRow(one).state == "waiting"
    scores = Scores(one.folder)
    for step, state in ((50, "waiting"), (100, "done")):
        scores.add((step, 1), Episodes([1.0], [3], [0]), dict)
        assert AgentRow(one).state == state
    scores.close()


def test_a_score_is_over_the_episodes_of_this_command_whatever_the_run_logged(
    tmp_path: Path,
) -> None:
    one = agent(tmp_path, seed="1")  # 100 episodes
    log(one.folder, [(50, 100, 0.0), (100, 200, 4.0)], mean_return=2.0)
    meta = {"successful": True, "args": {"episodes_for_avg": 200}}
    (one.folder / "meta.json").write_text(json.dumps(meta))
    assert AgentRow(one).progress.mean_return == 4.0
