# SPDX-License-Identifier: Apache-2.0
"""Asynchronous successive halving, which ends agents early that do worse than others (ASHA, Li et
al. 2020, https://arxiv.org/abs/1810.05934).
"""

from __future__ import annotations

import math

import numpy as np

_FACTOR, _RUNGS = 3, 3  # the best third goes on at 1/27, 1/9 and 1/3 of the steps


class Asha:
    """Compares each agent at some steps, its rungs, with the agents that came as far before it."""

    def __init__(self, total_steps: int) -> None:
        """total_steps: of the agents; the smallest number if they differ."""
        first = max(1, total_steps // _FACTOR**_RUNGS)
        rungs = [first * _FACTOR**rung for rung in range(_RUNGS)]
        self._returns: dict[int, dict[str, float]] = {step: {} for step in rungs}

    def ends(self, agent: str, step: int, mean_return: float) -> bool:
        """Returns whether the agent is to end; it is compared once at each rung, by its return when
        it is first seen there. NaN: no episode has ended, so it is not compared yet.
        """
        reached = [rung for rung in self._returns if rung <= step]
        if not reached or math.isnan(mean_return) or agent in self._returns[reached[-1]]:
            return False
        rung = self._returns[reached[-1]]
        earlier = list(rung.values())
        rung[agent] = mean_return
        return bool(earlier and mean_return < np.quantile(earlier, 1 - 1 / _FACTOR))
