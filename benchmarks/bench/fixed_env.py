# SPDX-License-Identifier: Apache-2.0
"""Fixed environments with the spaces of real ones, to measure the cost of transport alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec

FACTORY = "bench.fixed_env:make"


def like(env: EnvSpec) -> EnvSpec:
    """Returns the spec of fixed environments with the spaces of `env`."""
    return EnvSpec(FACTORY, {"like": env.as_json()})


def make(num_envs: int, like: Mapping[str, Any]) -> FixedEnv:
    """Makes `num_envs` fixed environments; the factory that FACTORY names. like: JSON of a spec."""
    return FixedEnv(num_envs, *_spaces(json.dumps(like)))


class FixedEnv:
    """A VecEnv that always returns the same step; no episode ends."""

    env_id = FACTORY

    def __init__(
        self,
        num_envs: int,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        frame_stack: int,
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self.frame_stack = frame_stack
        self._observation: ArrayNest = map_leaves(
            lambda spec: np.zeros((num_envs, *spec.shape), spec.dtype), observation_space
        )
        never = np.zeros(num_envs, bool)
        reward = np.zeros(num_envs, np.float32)
        self._step = VecStep(self._observation, reward, never, never, never, None)

    def reset(self, seed: int) -> ArrayNest:
        return self._observation

    def step(self, action: ArrayNest) -> VecStep:
        return self._step  # always the same arrays, which no caller writes to

    def close(self) -> None:
        pass


@functools.cache
def _spaces(like: str) -> tuple[ObservationSpace, ActionSpace, int]:
    with closing(make_environment(EnvSpec.from_json(json.loads(like)), 1)) as env:
        return env.observation_space, env.action_space, env.frame_stack
