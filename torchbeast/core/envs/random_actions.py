# SPDX-License-Identifier: Apache-2.0
"""Random actions for any action space, to step environments without a policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchbeast.core.envs import spaces
from torchbeast.core.nest_py import map_leaves


def random_action(space: spaces.ActionSpace, num_envs: int, rng: np.random.Generator) -> Any:
    """Returns one random action per environment, leaves [num_envs, ...].

    Real numbers are drawn from a standard normal distribution; the environment clips them to its
    bounds. Raises ValueError when a leaf of `space` is no action space.
    """
    return map_leaves(lambda leaf: _random_leaf(leaf, num_envs, rng), space)


def _random_leaf(leaf: Any, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    match leaf:
        case spaces.Discrete(n, start):
            return rng.integers(start, start + n, num_envs)
        case spaces.MultiDiscrete(nvec):
            return rng.integers(0, nvec, (num_envs, len(nvec)))
        case spaces.MultiBinary(shape):
            return rng.integers(0, 2, (num_envs, *shape))
        case spaces.Box(_, _, shape, dtype):
            return rng.normal(size=(num_envs, *shape)).astype(dtype)
    raise ValueError(f"not an action space: {leaf!r}")
