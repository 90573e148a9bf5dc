# SPDX-License-Identifier: Apache-2.0
"""Algorithms: their losses, their settings, and the base classes of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm as Algorithm
    from torchbeast.core.algos.base import Losses as Losses
    from torchbeast.core.algos.config import DQNConfig as DQNConfig
    from torchbeast.core.algos.config import IMPALAConfig as IMPALAConfig
    from torchbeast.core.algos.config import LASERConfig as LASERConfig
    from torchbeast.core.algos.config import PPOConfig as PPOConfig
    from torchbeast.core.algos.config import PQNConfig as PQNConfig
    from torchbeast.core.algos.config import R2D2Config as R2D2Config
    from torchbeast.core.algos.config import SACConfig as SACConfig
    from torchbeast.core.algos.config import TD3Config as TD3Config
    from torchbeast.core.algos.dqn import DDQN as DDQN
    from torchbeast.core.algos.dqn import DQN as DQN
    from torchbeast.core.algos.impala import IMPALA as IMPALA
    from torchbeast.core.algos.laser import LASER as LASER
    from torchbeast.core.algos.off_policy import OffPolicy as OffPolicy
    from torchbeast.core.algos.on_policy import OnPolicy as OnPolicy
    from torchbeast.core.algos.ppo import PPO as PPO
    from torchbeast.core.algos.pqn import PQN as PQN
    from torchbeast.core.algos.r2d2 import R2D2 as R2D2
    from torchbeast.core.algos.sac import SAC as SAC
    from torchbeast.core.algos.td3 import TD3 as TD3

__all__, __getattr__, __dir__ = importing(__name__)
