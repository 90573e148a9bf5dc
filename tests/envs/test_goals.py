# SPDX-License-Identifier: Apache-2.0
"""What steps would have brought with other goals."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from torchbeast.envs import EnvOptions, EnvSpec, env_process, make
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor

ACHIEVED = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], np.float32)
DESIRED = np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]], np.float32)


class Reach:
    """A goal environment of Gymnasium's interface; only its task is asked here."""

    def __init__(self, is_scalar: bool = False) -> None:
        import gymnasium

        self.action_space = gymnasium.spaces.Discrete(2)
        box = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        names = ("achieved_goal", "desired_goal", "observation")
        self.observation_space = gymnasium.spaces.Dict(dict.fromkeys(names, box))
        self._names, self._is_scalar = names, is_scalar

    def reset(self, seed: int | None = None) -> Any:
        return {name: np.zeros(2, np.float32) for name in self._names}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        distance = -np.abs(achieved - desired).sum(-1)
        return distance.sum() if self._is_scalar else distance


class Scaled:
    """A wrapper that scales rewards, and forwards no attributes, like Gymnasium's."""

    def __init__(self) -> None:
        self.env = Inner()
        self.action_space, self.observation_space = (
            self.env.action_space,
            self.env.observation_space,
        )
        self.unwrapped = self.env.env
        self.reset, self.step = self.env.reset, self.env.step

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return 10 * (1 + self.env.env.compute_reward(achieved, desired, info))


class Inner:
    """A wrapper without a compute_reward of its own."""

    def __init__(self) -> None:
        self.env = Reach()
        self.action_space, self.observation_space = (
            self.env.action_space,
            self.env.observation_space,
        )
        self.reset, self.step = self.env.reset, self.env.step

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> Any:
        return (achieved == desired).all(-1)


class NeverEnds(Reach):
    """Has Gymnasium-Robotics' compute_terminated."""

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> Any:
        return bool(info)


class ReadsInfo(Reach):
    def __init__(self, read: str) -> None:
        super().__init__()
        self._read = {
            "key": lambda info: info["is_success"],
            "get": lambda info: info.get("is_success", 0),
            "in": lambda info: "is_success" in info,
            "all": lambda info: [each["is_success"] for each in info],
        }[read]

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        self._read(info)
        return super().compute_reward(achieved, desired, info)


def outcome_of(name: str, **kwargs: Any) -> env_process.Outcome:
    with closing(make(EnvSpec(name, kwargs), 1)) as env:
        return env_process.outcome_in(env, name)


def test_a_built_in_environment_says_rewards_and_ends() -> None:
    rewards, terminated = outcome_of("BitFlip", bits=2)(ACHIEVED, DESIRED)
    assert rewards.tolist() == [0, -1, 0] and rewards.dtype == np.float32
    assert terminated.tolist() == [True, False, True]


def test_a_gymnasium_environment_without_ends_never_terminates() -> None:
    rewards, terminated = outcome_of(f"{__name__}:Reach")(ACHIEVED, DESIRED)
    assert rewards.tolist() == [0, -1, 0] and not terminated.any()


def test_an_environment_without_goals_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"Catch has no compute_reward.*remove hindsight_sha"):
        outcome_of("Catch")


def test_rewards_of_another_shape_are_refused_before_the_run() -> None:
    with pytest.raises(UsageError, match=r"compute_reward returns shape \[\] for 2 goals"):
        outcome_of(f"{__name__}:Reach", is_scalar=True)


def test_the_outermost_wrapper_with_a_method_says_rewards_and_ends() -> None:
    rewards, terminated = outcome_of(f"{__name__}:Scaled")(ACHIEVED, DESIRED)
    assert rewards.tolist() == [10, 0, 10]
    assert terminated.tolist() == [True, False, True]


def test_one_end_may_be_told_for_all_goals() -> None:
    _, terminated = outcome_of(f"{__name__}:NeverEnds")(ACHIEVED, DESIRED)
    assert terminated.tolist() == [False] * 3


@pytest.mark.parametrize("read", ["key", "get", "in", "all"])
def test_a_reward_that_reads_the_info_is_refused_before_the_run(read: str) -> None:
    message = "ReadsInfo: compute_reward .* reads the info's .*, but replays do not store infos: "
    with pytest.raises(UsageError, match=message):
        outcome_of(f"{__name__}:ReadsInfo", read=read)


def test_a_run_asks_for_outcomes_in_a_process_that_ends_with_it() -> None:
    """The entries of observations that the run selects do not matter."""
    supervisor = Supervisor()
    keys = EnvOptions(observation_keys=("desired_goal",))
    outcome = env_process.outcome_of(EnvSpec("BitFlip", {"bits": 2}, options=keys), supervisor)
    rewards, terminated = outcome(ACHIEVED, DESIRED)
    assert rewards.tolist() == [0, -1, 0] and terminated.tolist() == [True, False, True]
    supervisor.stop("the test is over")
    with pytest.raises(RunError, match="the run has ended"):
        outcome(ACHIEVED, DESIRED)
