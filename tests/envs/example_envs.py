# SPDX-License-Identifier: Apache-2.0
"""Environments that behave well or badly in one way each. Their episodes last four steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from torchbeast.envs.toy import Mock

EPISODE_LENGTH = 4


class Counting:
    """An environment of Gymnasium; the observation is the step of the episode plus the seed."""

    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.offset, self.time = 0, 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.offset = self.offset if seed is None else seed % 1000
        self.time = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.actions.append(action)
        self.time += 1
        ended = self.time == EPISODE_LENGTH
        return self.observation(), self.reward(), *self.ending(ended), {}

    def observation(self) -> Any:
        return np.array([self.offset + self.time], np.float32)

    def reward(self) -> Any:
        return 0.5

    def ending(self, ended: bool) -> tuple[bool, bool]:
        """Returns terminated and truncated."""
        return ended, False

    def close(self) -> None:
        self.closed = True


class Truncating(Counting):
    def ending(self, ended: bool) -> tuple[bool, bool]:
        return False, ended


class BothAtOnce(Counting):
    def ending(self, ended: bool) -> tuple[bool, bool]:
        return ended, ended


class ReusingItsBuffer(Truncating):
    """Writes the observations of all instances into the same array."""

    buffer = np.zeros(1, np.float32)

    def observation(self) -> Any:
        self.buffer[0] = self.offset + self.time
        return self.buffer


class Legacy:
    """An environment of old Gym: reset returns a bare observation, step four results."""

    action_space = spaces.Discrete(2)
    info: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.offset, self.time = 0, 0

    def seed(self, seed: int) -> None:
        self.offset = seed % 1000

    def reset(self) -> Any:
        self.time = 0
        return self.observation()

    def step(self, action: Any) -> tuple[Any, ...]:
        self.time += 1
        return self.observation(), 0.5, self.time == EPISODE_LENGTH, self.info

    def observation(self) -> Any:
        return np.array([self.offset + self.time], np.float32)


class LegacyWithTimeLimit(Legacy):
    info = {"TimeLimit.truncated": True}  # noqa: RUF012


class LegacyDict(Legacy):
    def observation(self) -> Any:
        return {"pair": [self.time, (self.offset, 1.5)], "image": np.full((2, 3), self.time, "u1")}


class Wrapper:
    """Passes its arguments on without naming them."""

    def __init__(self) -> None:
        self.env = Counting()
        self.action_space = self.env.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


class Changing(Counting):
    """Returns `changed`, which tests replace, from the second step on."""

    unchanged: Any = {"x": np.zeros((2, 3), np.float32), "y": 1}  # noqa: RUF012
    changed: Any = unchanged

    def observation(self) -> Any:
        return self.changed if self.time >= 2 else self.unchanged


class Failing(Counting):
    def step(self, action: Any) -> tuple[Any, ...]:
        raise KeyError("the environment's own failure")


def with_reward(reward: Any) -> type[Counting]:
    return type("Rewarding", (Counting,), {"reward": lambda self: reward})


def vector(num_envs: int) -> Mock:
    return Mock(num_envs, episode_length=3)


def lying_vector(num_envs: int) -> Any:
    return SimpleNamespace(num_envs=num_envs + 1)


not_callable = 3
