# SPDX-License-Identifier: Apache-2.0
"""An environment for the agents of test_learner_run.py, in a module that imports no torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class FourNumbers(gymnasium.Env[np.ndarray, int]):
    """Three steps, each of which pays the action."""

    observation_space = gymnasium.spaces.Box(-10, 10, (4,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._seen(), float(action), self._steps == 3, False, {}

    def _seen(self) -> np.ndarray:
        return self.np_random.standard_normal(4).astype(np.float32)
