# SPDX-License-Identifier: Apache-2.0
"""Environments that look like others and cost nothing: what is left is the cost of moving them.

A server makes them by the name FACTORY; what they look like is in a variable of its process.
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
    """What to serve to move the same as `env_id` does; for servers that are started meanwhile."""
    before = os.environ.get(_LIKE)
    os.environ[_LIKE] = json.dumps([env_id, options.as_json()])
    try:
        yield FACTORY
    finally:
        os.environ.pop(_LIKE)
        if before is not None:
            os.environ[_LIKE] = before


def make(num_envs: int) -> FixedEnv:
    """The factory."""
    return FixedEnv(num_envs, *_spaces(os.environ[_LIKE]))


class FixedEnv:
    """Nothing ever changes, and no episode ends."""

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
        nothing = np.zeros(num_envs, np.float32)
        self._step = VecStep(self._observation, nothing, never, never, never, None)

    def reset(self, seed: int) -> ArrayNest:
        return self._observation

    def step(self, action: ArrayNest) -> VecStep:
        return self._step  # the same arrays, which nobody writes

    def close(self) -> None:
        pass


@functools.cache
def _spaces(like: str) -> tuple[ObservationSpace, ActionSpace, int]:
    env_id, options = json.loads(like)
    with closing(make_environment(env_id, 1, EnvOptions.of(options))) as env:
        return env.observation_space, env.action_space, env.frame_stack
