# SPDX-License-Identifier: Apache-2.0
"""Environments with known numbers, for tests of sources.

Named `source_envs:NAME`, also in processes that a test starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import environment_seeds
from torchbeast.envs.toy import Catch

NUM_ACTIONS = 4
# How the episodes of environment e end, again and again: length, and "terminated", "truncated" or
# "life" (an end for learning, but the game goes on).
SCHEDULES = [
    [(3, "terminated")],
    [(4, "truncated")],
    [(2, "life"), (2, "life"), (3, "terminated")],
    [(1, "truncated"), (5, "life"), (2, "truncated")],
]


def reward_of(index: int, time: int) -> float:
    """Returns the reward of step `time` of an episode of environment `index`."""
    return (index + 1) * time - 2.5


class Counting:
    """A VecEnv of up to four; the observation is the number of steps since the last end."""

    env_id = "source_envs:Counting"
    frame_stack = 1
    observation_space = ArraySpec((1,), "float32")
    action_space = Discrete(NUM_ACTIONS)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> Any:
        self._episodes = [itertools.cycle(SCHEDULES[index]) for index in range(self.num_envs)]
        self._now = [next(episodes) for episodes in self._episodes]
        self._time = np.zeros(self.num_envs, np.int64)
        return self._observation()

    def step(self, action: Any) -> VecStep:
        self._time += 1
        last = self._observation()
        reward = [reward_of(index, int(time)) for index, time in enumerate(self._time)]
        ended = np.array([time == now[0] for time, now in zip(self._time, self._now, strict=True)])
        how = np.array([now[1] for now in self._now])
        truncated = ended & (how == "truncated")
        for index in np.flatnonzero(ended):
            self._time[index], self._now[index] = 0, next(self._episodes[index])
        return VecStep(
            self._observation(),
            np.array(reward, np.float32),
            ended & ~truncated,
            truncated,
            ended & (how != "life"),
            last[truncated] if truncated.any() else None,
        )

    def close(self) -> None:
        pass

    def _observation(self) -> np.ndarray:
        return self._time.astype(np.float32)[:, None]


class BeginningLate(Counting):
    """The same, but environment 0 begins its games one step late, in a reset row."""

    env_id = "source_envs:BeginningLate"
    _is_over = False

    def step(self, action: Any) -> VecStep:
        if not self._is_over:
            step = super().step(action)
            self._is_over = bool(step.episode_end[0])
            return step
        self._is_over = False
        step = super().step(action)
        self._time[0] = 0  # the others took a step
        first = np.arange(self.num_envs) == 0
        return step._replace(
            observation=self._observation(),
            reward=np.where(first, np.float32(0), step.reward),
            terminated=step.terminated | first,
            resets=first,
        )


class Stacked(Counting):
    """Images that are stacked by threes; every byte is the number of steps since the last end."""

    env_id = "source_envs:Stacked"
    frame_stack = 3
    observation_space = ArraySpec((1, 40, 40), "uint8")

    def _observation(self) -> np.ndarray:
        return np.repeat(self._time.astype(np.uint8), 1600).reshape(-1, 1, 40, 40)


class Numbered:
    """A VecEnv without ends; it observes its seed, the number of steps and the last action (-1 at
    first).
    """

    env_id = "source_envs:Numbered"
    frame_stack = 1
    observation_space = ArraySpec((3,), "int64")
    action_space = Discrete(NUM_ACTIONS)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> Any:
        self._numbers = environment_seeds(seed, self.num_envs)
        self._time = 0
        return self._observation(np.full(self.num_envs, -1))

    def step(self, action: Any) -> VecStep:
        self._time += 1
        never = np.zeros(self.num_envs, bool)
        reward = np.zeros(self.num_envs, np.float32)
        return VecStep(self._observation(action), reward, never, never, never, None)

    def close(self) -> None:
        pass

    def _observation(self, action: Any) -> np.ndarray:
        times = np.full(self.num_envs, self._time)
        return np.stack([self._numbers, times, action], axis=1).astype(np.int64)


class Big(Numbered):
    """Has observations of 32 KiB."""

    env_id = "source_envs:Big"
    observation_space = ArraySpec((8192,), "float32")

    def _observation(self, action: Any) -> np.ndarray:
        return np.full((self.num_envs, 8192), self._time, np.float32)


class Nested:
    """Gymnasium's interface, nested actions and observations; the action is shown again.

    Truncated after five steps and terminated after three, in turn.
    """

    action_space = gym_spaces.Dict(
        {
            "choice": gym_spaces.Discrete(3, start=1),
            "levers": gym_spaces.Tuple(
                [gym_spaces.MultiDiscrete([2, 3]), gym_spaces.Box(-0.5, 0.5, (2, 1))]
            ),
            "switches": gym_spaces.MultiBinary(3),
        }
    )

    def __init__(self) -> None:
        self.episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.time = 0
        self.episodes += 1
        return self.observation(NOTHING), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.time += 1
        cut = self.episodes % 2 == 0
        over = self.time == (5 if cut else 3)
        return self.observation(action), 1.0, over and not cut, over and cut, {}

    def observation(self, shown: Any) -> Any:
        time = np.float32(self.time)
        return {"shown": shown, "time": (time, np.full((2, 3), self.time, np.uint8))}


NOTHING = {
    "choice": np.int64(0),
    "levers": (np.zeros(2, np.int64), np.zeros((2, 1), np.float32)),
    "switches": np.zeros(3, np.int8),
}


class Raises(Numbered):
    """Fails in its third step, before a source may go on without it."""

    env_id = "source_envs:Raises"

    def step(self, action: Any) -> VecStep:
        if self._time == 3:
            raise KeyError("the joystick is gone")
        return super().step(action)


class CannotBeMade(Numbered):
    env_id = "source_envs:CannotBeMade"

    def __init__(self, num_envs: int) -> None:
        raise OSError("no ROM in the slot")


class HasNoNext(Numbered):
    env_id = "source_envs:HasNoNext"

    def __init__(self, num_envs: int) -> None:
        next(iter(()))


class FirstHangs(Numbered):
    """Never ends its first step, in the first process only, which writes its id into $MARKER."""

    env_id = "source_envs:FirstHangs"

    def step(self, action: Any) -> VecStep:
        with contextlib.suppress(FileExistsError), open(os.environ["MARKER"], "x") as marker:
            marker.write(str(os.getpid()))
            marker.flush()
            threading.Event().wait()
        return super().step(action)


class Crashes(Numbered):
    """Ends the process without a report in its first step."""

    env_id = "source_envs:Crashes"

    def step(self, action: Any) -> VecStep:
        print("out of memory in the emulator", flush=True)
        os._exit(3)


class Telling:
    """Gymnasium's interface; episodes of 1 to 4 steps, whose last info tells of them."""

    info: dict[str, Any]
    observation_space = gym_spaces.Box(0.0, 10.0, (1,))
    action_space = gym_spaces.Discrete(2)

    def __init__(self) -> None:
        self.info = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.length = (getattr(self, "length", 0) if seed is None else seed % 4) % 4 + 1
        self.time = 0
        self.info.clear()  # as an environment may that uses one dict again and again
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.time += 1
        over = self.time == self.length
        self.info |= {"steps": -1, "word": "three"}  # only those of last steps count
        if over:
            self.info |= {"steps": self.time, "squared": np.array([self.time**2])}
            self.info |= {"sometimes": True} if self.length == 2 else {}
        return self.observation(), float(self.time), over, False, self.info

    def observation(self) -> Any:
        return np.full(1, self.time, np.float32)


class Sleeping(Catch):
    """Catch whose environments wait for simulators elsewhere in every step, all at once."""

    def step(self, action: Any) -> VecStep:
        time.sleep(0.1)
        return super().step(action)
