# SPDX-License-Identifier: Apache-2.0
"""The environment interface: spaces, the vector protocol, frame stacks. Numpy only."""

from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete, MultiBinary, MultiDiscrete
from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv, VecStep

__all__ = [
    "ArraySpec",
    "Box",
    "Discrete",
    "MultiBinary",
    "MultiDiscrete",
    "SyncVecEnv",
    "VecEnv",
    "VecStep",
]
