# SPDX-License-Identifier: Apache-2.0
"""A user's environment that fails."""

from __future__ import annotations

from typing import Any

import numpy as np


class Raises:
    """An environment whose third step raises."""

    def __init__(self) -> None:
        from gymnasium.spaces import Discrete

        self.action_space = Discrete(2)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            raise KeyError("the joystick is gone")
        return np.zeros(4, np.float32), 1.0, False, False, {}
