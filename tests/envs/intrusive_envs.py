# SPDX-License-Identifier: Apache-2.0
"""Environments that affect the process they run in; named "intrusive_envs:NAME"."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast import envs

NEVER_S = 300.0
PICTURE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


class Quiet:
    """Affects nothing; others do one thing each. Its observation is the id of a process."""

    observation_space = spaces.Box(0, 2**31, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def observed(self) -> int:
        return os.getpid()

    def reset(self, *, seed: int | None = None) -> Any:
        return np.array([self.observed()], np.float64), {"an object": self}

    def step(self, action: int) -> Any:
        return np.array([self.observed()], np.float64), 1.0, True, False, {"an object": self}


class TakesOver(Quiet):
    """Sets what is global in a process."""

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        os.chdir("/")
        os.environ["INTRUDED"] = "1"
        np.seterr(all="raise")


class LeavesHelper(Quiet):
    """Starts a process that multiprocessing would wait for."""

    def __init__(self) -> None:
        self.helper = multiprocessing.Process(target=time.sleep, args=(NEVER_S,))
        self.helper.start()

    def observed(self) -> int:
        assert self.helper.pid is not None
        return self.helper.pid


class StopsHelper(LeavesHelper):
    """The same, but stops it in the end."""

    def close(self) -> None:
        self.helper.terminate()
        self.helper.join()


class FailsWithHelper(LeavesHelper):
    """The same, but cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no joystick")


class Hangs(Quiet):
    def __init__(self) -> None:
        time.sleep(NEVER_S)


class Waits(Quiet):
    """Its steps wait for a byte in a named pipe."""

    def __init__(self, path: str) -> None:
        self._pipe = os.open(path, os.O_RDWR)

    def step(self, action: int) -> Any:
        os.read(self._pipe, 1)
        return super().step(action)


class Painted(gymnasium.Env[Any, Any]):
    """Renders pictures, if it is asked to when it is made."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def render(self) -> Any:
        return PICTURE if self.render_mode == "rgb_array" else None


gymnasium.register("Painted-v0", Painted)


def paints_differently(num_envs: int) -> Any:
    """Returns a VecEnv that has a method `render` of its own."""
    env: Any = envs.make("Catch", num_envs)
    env.render = lambda: "a window"
    return env


class Exits(Quiet):
    def step(self, action: int) -> Any:
        sys.exit("bye")


class Crashes(Quiet):
    def step(self, action: int) -> Any:
        print("last words", flush=True)
        os._exit(7)
