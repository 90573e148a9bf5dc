# SPDX-License-Identifier: Apache-2.0
"""An environment of constant cost, for benchmarks and tests of everything around it."""

from __future__ import annotations

import numpy as np

from torchbeast.core.envs.spaces import ArrayNest, ArraySpec, Discrete
from torchbeast.core.envs.vec_env import VecStep, check_discrete, environment_seeds
from torchbeast.envs.spec import EnvError


class Mock:
    """An environment with the spaces of an Atari game, four stacked frames, and known content.

    Every byte of an observation is (seed of the environment + step of the episode) % 256, every
    reward is 1, and every episode ends after episode_length steps.
    """

    env_id = "Mock"
    frame_stack = 1

    def __init__(self, num_envs: int, episode_length: int = 200) -> None:
        if episode_length < 1:
            raise EnvError(f"episode_length must be at least 1, got {episode_length}")
        self.num_envs = num_envs
        self.observation_space = ArraySpec((4, 84, 84), "uint8")
        self.action_space = Discrete(6)
        self._episode_length = episode_length

    def reset(self, seed: int) -> ArrayNest:
        self._seeds = np.array(environment_seeds(seed, self.num_envs))
        self._step = 0
        return self._observation()

    def step(self, action: ArrayNest) -> VecStep:
        check_discrete(action, self.action_space, self.num_envs)
        self._step = (self._step + 1) % self._episode_length
        reward = np.ones(self.num_envs, np.float32)
        ended = np.full(self.num_envs, self._step == 0)
        never = np.zeros(self.num_envs, bool)
        return VecStep(self._observation(), reward, ended, never, ended.copy(), None)

    def close(self) -> None:
        pass

    def _observation(self) -> np.ndarray:
        """Returns the observations, uint8 [E, 4, 84, 84]."""
        values = ((self._seeds + self._step) % 256).astype(np.uint8)
        return np.repeat(values, 4 * 84 * 84).reshape(self.num_envs, 4, 84, 84)
