# SPDX-License-Identifier: Apache-2.0
"""Sends numbers of an environment's info with its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchbeast.core.envs.contract import final_info_of, numbers_of_games


class TellingEnv:
    """A vector environment of one stream, whose steps have a seventh value for
    `libtorchbeast.Server`: the numbers of games that ended, float32 [N, K], or None.
    """

    def __init__(self, env: Any, keywords: Sequence[str]) -> None:
        """keywords: of the K numbers."""
        self._env, self._keywords = env, tuple(keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> tuple[Any, ...]:
        """Steps all environments."""
        step = self._env.step(action)
        games = np.flatnonzero(step.episode_end).tolist()
        info = final_info_of(self._env)
        return (*step, numbers_of_games(info, self._keywords, games) if games else None)
