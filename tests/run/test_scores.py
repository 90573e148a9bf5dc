# SPDX-License-Identifier: Apache-2.0
"""The score of an agent of many tasks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from torchbeast.envs.spec import EnvOptions, EnvSpec
from torchbeast.reporting.display import Progress
from torchbeast.run.episodes import TaskScores
from torchbeast.run.training import Rows

TWO = "PongNoFrameskip-v4,ALE/Breakout-v5"


def test_atari_games_have_the_mean_capped_human_normalised_score() -> None:
    scores = TaskScores(EnvSpec(TWO))
    random = {0: -20.7, 1: 1.7}  # Espeholt et al. 2018, table C.1
    human = {0: 14.6, 1: 30.5}
    assert scores(random) == pytest.approx(0.0)
    assert scores(human) == pytest.approx(1.0)
    assert TaskScores(EnvSpec("envpool:Pong-v5,envpool:Breakout-v5"))(human) == pytest.approx(1.0)
    assert scores({0: -20.7, 1: 3000.0}) == pytest.approx(0.5)  # not made up for by the other
    assert scores({0: -20.7, 1: -20.7}) < 0  # there is no lower limit


def test_given_returns_are_the_scale_and_have_no_limit() -> None:
    options = EnvOptions(task_returns=(0, 10, -100, 100))
    scores = TaskScores(EnvSpec("Catch,Memory", options=options))
    assert scores({0: 20.0, 1: 0.0}) == pytest.approx((2.0 + 0.5) / 2)
    assert TaskScores(EnvSpec("Catch,Memory"))({0: 20.0, 1: 0.0}) == 10.0


def test_pairs_of_returns_are_checked() -> None:
    for wrong in [(1.0,), (1.0, 1.0), (2.0, 1.0), (-math.inf, 1.0), (0.0, math.inf)]:
        with pytest.raises(ValueError, match="pairs of a lower and a higher return"):
            EnvOptions(task_returns=wrong)


def test_a_task_that_does_not_exist_has_no_part_in_the_score() -> None:
    rows: Any = SimpleNamespace(progress=Progress())
    rows.progress.keep_last(2, ["a", "b"])
    assert Rows._by_task(rows, [1.0, 3.0, 5.0], [0, 7, -1]) == {0: 1.0}


def test_the_mean_return_of_a_run_is_the_score_of_each_tasks_last_episodes() -> None:
    progress = Progress()
    progress.keep_last(2, ["a", "b"])
    progress.score = TaskScores(EnvSpec("a,b", options=EnvOptions(task_returns=(0, 10, 0, 1000))))
    assert progress.task_means().keys() == {"a", "b"}
    progress.by_task["a"].extend([0.0, 5.0, 5.0])
    assert progress.mean_return() == 0.5  # of the only task with episodes
    progress.by_task["b"].append(1000.0)
    assert progress.mean_return() == pytest.approx(0.75)
    resumed = Progress()
    resumed.load_state_dict(progress.state_dict())
    resumed.keep_last(2, ["a", "b"])
    assert resumed.task_means() == progress.task_means()
