# SPDX-License-Identifier: Apache-2.0
"""Algorithms: their losses, and the optimiser step they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.algos.impala import Impala as IMPALA
    from torchbeast.core.algos.laser import Laser as LASER
    from torchbeast.core.algos.ppo import PPO as PPO

__all__ = ["IMPALA", "LASER", "PPO"]

_FOUND_IN = {
    "IMPALA": "impala:Impala",
    "LASER": "laser:Laser",
    "PPO": "ppo",
}

__getattr__ = importing(__name__, _FOUND_IN)
