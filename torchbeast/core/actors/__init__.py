# SPDX-License-Identifier: Apache-2.0
"""Networks that map observations to a policy and a value, and the distributions of actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.actors.contract import Acted as Acted
    from torchbeast.core.actors.contract import Actor as Actor
    from torchbeast.core.actors.contract import ActorCritic as ActorCritic
    from torchbeast.core.actors.contract import ModelInputs as ModelInputs
    from torchbeast.core.actors.contract import ModelOutput as ModelOutput
    from torchbeast.core.actors.distributions import ActionDistribution as ActionDistribution
    from torchbeast.core.actors.distributions import SquashedGaussian as SquashedGaussian
    from torchbeast.core.actors.distributions import distribution_for as distribution_for
    from torchbeast.core.actors.off_policy import OffPolicyActor as OffPolicyActor
    from torchbeast.core.actors.registry import OffPolicyActorCritic as OffPolicyActorCritic
    from torchbeast.core.actors.registry import OnPolicyActorCritic as OnPolicyActorCritic
    from torchbeast.core.actors.registry import get_feature_extractor as get_feature_extractor

__all__, __getattr__, __dir__ = importing(__name__)
