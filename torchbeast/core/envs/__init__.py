# SPDX-License-Identifier: Apache-2.0
"""The environment interface: spaces, the vector protocol, frame stacks. Numpy only."""

from torchbeast.core.envs.vec_env import VecEnv as VecEnv
