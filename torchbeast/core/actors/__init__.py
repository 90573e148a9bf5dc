# SPDX-License-Identifier: Apache-2.0
"""Networks: what sees observations and gives a policy and a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.actors.registry import OffPolicyActorCritic as OffPolicyActorCritic
    from torchbeast.core.actors.registry import OnPolicyActorCritic as OnPolicyActorCritic
    from torchbeast.core.actors.registry import get_feature_extractor as get_feature_extractor

__all__ = ["OffPolicyActorCritic", "OnPolicyActorCritic", "get_feature_extractor"]

__getattr__ = importing(__name__, dict.fromkeys(__all__, "registry"))
