# SPDX-License-Identifier: Apache-2.0
"""The environment interface: spaces, the vector protocol, frame stacks. Numpy only."""

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete, MultiBinary, MultiDiscrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv

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
