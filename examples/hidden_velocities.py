# SPDX-License-Identifier: Apache-2.0
"""CartPole-v1 without its two velocities, which a policy with memory can tell from positions.

In this folder:

    python -m torchbeast.monobeast --env hidden_velocities:cartpole --algo r2d2 --num_envs 16 \\
        --unroll_length 32 --burn_in 16 --batch_size 2 --learning_rate 0.001 --discounting 0.99 \\
        --exploration_steps 30000 --target_period 100 --replay_size 50000 --total_steps 150000
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class HiddenVelocities(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Shows the position of the cart and the angle of the pole."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        self.observation_space = gymnasium.spaces.Box(space.low[::2], space.high[::2])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[::2]


def cartpole() -> HiddenVelocities:
    """Makes the environment."""
    return HiddenVelocities(gymnasium.make("CartPole-v1"))
