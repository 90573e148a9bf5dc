# SPDX-License-Identifier: Apache-2.0
"""Fixed environments with the spaces of real ones, to measure the cost of transport alone.

An environment server makes them by the name FACTORY; an environment variable of its process names
the environment whose spaces they have.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.vec_env import VecStep
from torchbeast.core.nest_py import map_leaves
from torchbeast.envs.opening import make_environment
from torchbeast.envs.options import DEFAULTS, EnvOptions

FACTORY = "torchbeast.bench.fixed_env:make"
_LIKE = "TORCHBEAST_BENCH_LIKE"


@contextmanager
def like(env_id: str, options: EnvOptions = DEFAULTS) -> Iterator[str]:
    """Yields the id of a fixed environment with the spaces of `env_id`.

    It is valid for environment servers that are started within the context.
    """
    before = os.environ.get(_LIKE)
    os.environ[_LIKE] = json.dumps([env_id, options.as_json()])
    try:
        yield FACTORY
    finally:
        os.environ.pop(_LIKE)
        if before is not None:
            os.environ[_LIKE] = before


def make(num_envs: int) -> FixedEnv:
    """Makes `num_envs` fixed environments; the factory that FACTORY names."""
    return FixedEnv(num_envs, *_spaces(os.environ[_LIKE]))


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
    env_id, options = json.loads(like)
    with closing(make_environment(env_id, 1, EnvOptions.of(options))) as env:
        return env.observation_space, env.action_space, env.frame_stack
