# SPDX-License-Identifier: Apache-2.0
"""An environment with NetHack's default observation (nle 1.3's `NetHackScore-v0`), of made-up
games.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

ROWS, COLUMNS = 21, 79
BYTE = (0, 255, np.uint8)
# low, high, dtype and shape, as nle says them.
LEAVES: dict[str, tuple[int, int, Any, tuple[int, ...]]] = {
    "blstats": (-(2**31), 2**31 - 1, np.int64, (27,)),
    "chars": (*BYTE, (ROWS, COLUMNS)),
    "colors": (0, 15, np.uint8, (ROWS, COLUMNS)),
    "glyphs": (0, 5976, np.int16, (ROWS, COLUMNS)),
    "inv_glyphs": (0, 5976, np.int16, (55,)),
    "inv_letters": (0, 127, np.uint8, (55,)),
    "inv_oclasses": (0, 18, np.uint8, (55,)),
    "inv_strs": (*BYTE, (55, 80)),
    "message": (*BYTE, (256,)),
    "screen_descriptions": (0, 127, np.uint8, (ROWS, COLUMNS, 80)),
    "specials": (*BYTE, (ROWS, COLUMNS)),
    "tty_chars": (*BYTE, (24, 80)),
    "tty_colors": (0, 31, np.int8, (24, 80)),
    "tty_cursor": (*BYTE, (2,)),
}


class FakeNetHack:
    """Returns observations within their bounds; statistics are from 1 to a million."""

    action_space = spaces.Discrete(23)
    observation_space = spaces.Dict(
        {
            name: spaces.Box(low, high, shape, dtype)
            for name, (low, high, dtype, shape) in LEAVES.items()
        }
    )

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rng = self._rng
        return self._observation(), rng.normal(), rng.random() < 0.02, rng.random() < 0.02, {}

    def _observation(self) -> dict[str, np.ndarray]:
        seen = {
            name: self._rng.integers(low, high, shape, dtype, endpoint=True)
            for name, (low, high, dtype, shape) in LEAVES.items()
        }
        scale = np.logspace(0, 6, 27)
        return seen | {"blstats": (scale * self._rng.uniform(1, 2, 27)).astype(np.int64)}
