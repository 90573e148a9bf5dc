# SPDX-License-Identifier: Apache-2.0
"""Networks: what sees observations and gives a policy and a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.actors.factory import OffPolicyActorCritic as OffPolicyActorCritic
    from torchbeast.core.actors.factory import OnPolicyActorCritic as OnPolicyActorCritic
    from torchbeast.core.actors.factory import get_feature_extractor as get_feature_extractor

__all__ = ["OffPolicyActorCritic", "OnPolicyActorCritic", "get_feature_extractor"]

_FOUND_IN = {
    "OffPolicyActorCritic": "factory",
    "OnPolicyActorCritic": "factory",
    "get_feature_extractor": "factory",
}

__getattr__ = importing(__name__, _FOUND_IN)
