# SPDX-License-Identifier: Apache-2.0
"""Algorithms: their losses, and the optimiser step they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.algos.dqn import DQN as DDQN
    from torchbeast.core.algos.dqn import DQN as DQN
    from torchbeast.core.algos.impala import Impala as IMPALA
    from torchbeast.core.algos.laser import Laser as LASER
    from torchbeast.core.algos.ppo import PPO as PPO
    from torchbeast.core.algos.sac import SAC as SAC
    from torchbeast.core.algos.td3 import TD3 as TD3

__all__ = ["DDQN", "DQN", "IMPALA", "LASER", "PPO", "SAC", "TD3"]

_FOUND_IN = {
    "DDQN": "dqn:DQN",
    "DQN": "dqn",
    "IMPALA": "impala:Impala",
    "LASER": "laser:Laser",
    "PPO": "ppo",
    "SAC": "sac",
    "TD3": "td3",
}

__getattr__ = importing(__name__, _FOUND_IN)
