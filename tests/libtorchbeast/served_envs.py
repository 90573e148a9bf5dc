# SPDX-License-Identifier: Apache-2.0
"""Environments for servers: each behaves well or badly in one way.

Episodes have three steps of reward 2. An observation counts the steps within its episode.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import numpy as np

EPISODE_LENGTH = 3
REWARD = 2.0


class Space:
    """The attributes of a discrete action space that a server reads."""

    n = 4
    start = 1


class Counting:
    """An environment of Gymnasium."""

    action_space = Space()

    def __init__(self) -> None:
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.time += 1
        return self.observation(), REWARD, *self.ending(self.time == EPISODE_LENGTH), {}

    def observation(self) -> Any:
        return np.full((2, 2), self.time, np.uint8)

    def ending(self, over: bool) -> tuple[bool, bool]:
        """Returns terminated and truncated."""
        return over, False


class Legacy:
    """An environment of old Gym; `values` follow (obs, reward, done)."""

    values: ClassVar[tuple[Any, ...]] = ({},)

    def __init__(self) -> None:
        self.time = 0

    def reset(self) -> Any:
        self.time = 0
        return np.full((2, 2), self.time, np.uint8)

    def step(self, action: Any) -> tuple[Any, ...]:
        self.time += 1
        over = self.time == EPISODE_LENGTH
        return np.full((2, 2), self.time, np.uint8), REWARD, over, *self.values


class VecStep(NamedTuple):
    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    episode_end: Any
    final_observation: Any


class Vector:
    """`num_envs` environments; the first digit of an observation is the environment's."""

    num_envs = 3

    def __init__(self) -> None:
        self.time = 0

    def reset(self, seed: int) -> Any:
        self.time = 0
        return self.observation()

    def step(self, action: Any) -> VecStep:
        self.time += 1
        over = np.full(self.num_envs, self.time == EPISODE_LENGTH)
        if over.all():
            self.time = 0
        never = np.zeros(self.num_envs, bool)
        reward = np.full(self.num_envs, REWARD, np.float32)
        return VecStep(self.observation(), reward, over, never, over, None)

    def observation(self) -> Any:
        return np.arange(self.num_envs, dtype=np.int32)[:, None] * 10 + self.time


class ToldStep(NamedTuple):
    """A VecStep with the numbers of games that ended."""

    observation: Any
    reward: Any
    terminated: Any
    truncated: Any
    episode_end: Any
    final_observation: Any
    info: Any


class Telling:
    """Two numbers of each game of a Vector that ends: its environment, and no number."""

    num_envs = Vector.num_envs

    def __init__(self) -> None:
        self._env = Vector()

    def reset(self, seed: int) -> Any:
        return self._env.reset(seed)

    def step(self, action: Any) -> ToldStep:
        step = self._env.step(action)
        return ToldStep(*step, self.told() if step.episode_end.any() else None)

    def told(self) -> Any:
        return np.array([[e, np.nan] for e in range(self.num_envs)], np.float32)


class Lives(Vector):
    """Loses a life with every step and ends a game with every third."""

    def step(self, action: Any) -> VecStep:
        return super().step(action)._replace(terminated=np.ones(self.num_envs, bool))


class TruncatedVector(Vector):
    """Truncates its environments 0 and 2 where the others end."""

    def step(self, action: Any) -> VecStep:
        last = self.observation() + 1
        step = super().step(action)
        if not step.episode_end.any():
            return step
        truncated = np.array([True, False, True])
        return step._replace(
            terminated=~truncated, truncated=truncated, final_observation=last[truncated]
        )


class Recording(Counting):
    """Keeps the seeds and actions that reached any instance, and which instances were closed."""

    seeds: ClassVar[list[Any]] = []
    actions: ClassVar[list[Any]] = []
    closed: ClassVar[list[Any]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        return super().reset()

    def step(self, action: Any) -> tuple[Any, ...]:
        self.actions.append(action)
        return super().step(action)

    def close(self) -> None:
        self.closed.append(self)

    @classmethod
    def forget(cls) -> None:
        for kept in (cls.seeds, cls.actions, cls.closed):
            kept.clear()


class Raising(Counting):
    """Fails in its second step."""

    def observation(self) -> Any:
        if self.time == 2:
            raise KeyError("the joystick is gone")
        return super().observation()


class Waiting(Counting):
    """Waits in its second step until the test lets it continue."""

    inside: ClassVar[threading.Event] = threading.Event()
    go_on: ClassVar[threading.Event] = threading.Event()

    def observation(self) -> Any:
        if self.time == 2:
            self.inside.set()
            self.go_on.wait(60)
        return super().observation()

    @classmethod
    def forget(cls) -> None:
        cls.inside.clear()
        cls.go_on.clear()


class WaitingThenRaising(Waiting):
    def observation(self) -> Any:
        observation = super().observation()
        if self.time == 2:
            raise KeyError("the joystick is gone")
        return observation


def with_observations(*observations: Any) -> type[Counting]:
    """Returns a class of environments with these observations, the last of them forever."""

    class Observing(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.left = list(observations)

        def observation(self) -> Any:
            return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    return Observing


def with_step(result: Any) -> type[Counting]:
    """Returns a class of environments whose every step returns this."""
    return type("Stepping", (Counting,), {"step": lambda self, action: result})


def with_vec_step(**changes: Any) -> type[Vector]:
    """Returns a class of vector environments whose steps have these values, else valid ones."""

    class Changed(Vector):
        def step(self, action: Any) -> VecStep:
            return super().step(action)._replace(**changes)

    return Changed


class RaisingLate(Counting):
    """Fails in its 12th step, after two rollouts of four; `mended` ends that."""

    mended: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def step(self, action: Any) -> tuple[Any, ...]:
        self.steps += 1
        if self.steps == 12 and not self.mended:
            raise KeyError("the joystick is gone")
        return super().step(action)
