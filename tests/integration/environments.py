# SPDX-License-Identifier: Apache-2.0
"""A user's environments, copied into the folder where the tests start programs."""

import os
import subprocess
import sys
import threading
import time

import numpy as np


class Plain:
    """An environment of Gymnasium with 10 steps per episode, each with reward 1."""

    def __init__(self):
        from gymnasium.spaces import Discrete

        self.action_space = Discrete(2)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.episode_step = 0
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        self.episode_step += 1
        return self.observation(), self.reward(), self.episode_step == 10, False, {}

    def observation(self):
        return np.full(4, self.episode_step / 10, np.float32)

    def reward(self):
        return 1.0


class Legacy(Plain):
    """An environment of old Gym."""

    def reset(self):
        self.episode_step = 0
        return self.observation()

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class Telling(Plain):
    """Episodes of 1 to 4 steps, whose last info tells their number; step n has reward n."""

    length = 0

    def reset(self, *, seed=None, options=None):
        self.length = self.length % 4 + 1
        return super().reset()

    def step(self, action):
        observation, _, _, _, _ = super().step(action)
        over = self.episode_step == self.length
        info = {"length": self.episode_step, "squared": self.episode_step**2} if over else {}
        return observation, float(self.episode_step), over, False, info


class Simulated(Plain):
    """Starts a program, and does not return from `close` once it was stepped."""

    def __init__(self):
        super().__init__()
        words = [sys.executable, "-c", "import time; time.sleep(300)", "torchbeast.simulator"]
        self.program = subprocess.Popen(words)

    def close(self):
        if self.steps:
            time.sleep(300)
        self.program.kill()
        self.program.wait()


class HugeReward(Plain):
    """Its rewards are finite, but their squares, which the loss adds up, are not."""

    def reward(self):
        return 1e30 if self.steps > 200 else 1.0


class Raises(Plain):
    def observation(self):
        if self.steps == 100:
            raise KeyError("the joystick is gone")
        return super().observation()


class RaisesTwice(Plain):
    """Fails in its 300th step, if fewer than two have failed before."""

    def observation(self):
        if self.steps == 300:
            with open("failures", "a+") as file:
                file.write("x")
                if file.tell() <= 2:
                    raise KeyError("the joystick is gone")
        return super().observation()


class CannotBeMade(Plain):
    def __init__(self):
        raise OSError("no ROM in the slot")


class Stuck(Plain):
    """Never ends its 100th step."""

    def observation(self):
        if self.steps == 100:
            threading.Event().wait()
        return super().observation()


class Exits(Plain):
    """Ends its process in the 100th step, like a crash in C code."""

    def observation(self):
        if self.steps == 100:
            import os

            print("out of memory in the emulator", flush=True)
            os._exit(3)
        return super().observation()


class ExitsAtOnce(Plain):
    """Ends its process before it has served anything."""

    def __init__(self):
        import os

        print("no cartridge in the emulator", flush=True)
        os._exit(3)


class NeverWithTorch(Plain):
    """Fails if anything in its process has imported torch."""

    def observation(self):
        assert "torch" not in sys.modules, "torch was imported by an environment server"
        return super().observation()


class Truncated(Plain):
    """Ends only by a time limit."""

    def step(self, action):
        observation, reward, over, _, info = super().step(action)
        return observation, reward, False, over, info


class Worded(Truncated):
    """Observes a dict with a string, as MiniGrid's, and a nested dict of two arrays."""

    def observation(self):
        vector = np.full(3, self.episode_step, np.float32)
        return {"mission": "go on", "inner": {"vector": vector, "big": np.zeros(1000)}}


class Mixed(Truncated):
    """Observes a dict of an image and a number; truncated by a time limit."""

    def observation(self):
        image = np.full((2, 40, 40), self.episode_step, np.uint8)
        return {"image": image, "number": np.float32(self.episode_step)}


class Sized(Plain):
    """Observations of a size that the user chooses."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def observation(self):
        return np.zeros(self.size, np.float32)


class Delayed(Plain):
    """Shows a cue at first, asks for it 4 to 9 steps later, and pays 1 or -1."""

    random = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.cue, self.delay = self.random.integers(2), self.random.integers(4, 10)
        return super().reset()

    def step(self, action):
        asked = self.episode_step == self.delay
        reward = float(2 * (action == self.cue) - 1) if asked else 0.0
        self.episode_step += 1
        return self.observation(), reward, asked, False, {}

    def observation(self):
        cue = 2 * self.cue - 1 if self.episode_step == 0 else 0
        return np.array([cue, self.episode_step == self.delay], np.float32)


class Poor(Plain):
    """A walk on five cells from the third to the first, for a reward of 1 within 8 steps."""

    goal, prize = 0, 1.0

    def reset(self, *, seed=None, options=None):
        self.cell = 2
        return super().reset()

    def step(self, action):
        self.episode_step += 1
        self.cell = np.clip(self.cell + 2 * int(action) - 1, 0, 4)
        there = self.cell == self.goal
        return self.observation(), there * self.prize, bool(there), self.episode_step == 8, {}

    def observation(self):
        return np.array([self.cell / 4, self.goal / 4], np.float32)


class Rich(Poor):
    """Leads to the last cell, for a reward of 500."""

    goal, prize = 4, 500.0


class Marked(Plain):
    """Observes a number of this object, and how often it was stepped."""

    def __init__(self):
        super().__init__()
        self.number = np.random.default_rng().integers(1 << 16)

    def observation(self):
        return np.array([self.number / (1 << 16), self.steps % (1 << 12) / (1 << 12)], np.float32)


class LeavesOneOut(Marked):
    """Is Marked, but one of its steps is lost on the way."""

    def step(self, action):
        if self.steps == 100:
            super().step(action)
        return super().step(action)


class Replaced(Marked):
    """Is Marked, but another object goes on in its place, which counts on."""

    def step(self, action):
        if self.steps == 100:
            self.number = (self.number + 1) % (1 << 16)
        return super().step(action)


class MarkedOfAHost(Marked):
    """Is Marked; each step takes as many seconds as the variable STEP_S of its host says."""

    def step(self, action):
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return super().step(action)
