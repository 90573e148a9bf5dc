# SPDX-License-Identifier: Apache-2.0
"""Storages of experience, and the batches that algorithms get from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.storages.batch import Feedback as Feedback
    from torchbeast.core.storages.rollout import Rollout as Rollout
    from torchbeast.core.storages.storage import (
        HindsightExperienceReplayBuffer as HindsightExperienceReplayBuffer,
    )
    from torchbeast.core.storages.storage import OnPolicyBuffer as OnPolicyBuffer
    from torchbeast.core.storages.storage import OnPolicyGAEBuffer as OnPolicyGAEBuffer
    from torchbeast.core.storages.storage import OnPolicyVTraceBuffer as OnPolicyVTraceBuffer
    from torchbeast.core.storages.storage import ReplayBuffer as ReplayBuffer
    from torchbeast.core.storages.storage import RolloutReplayBuffer as RolloutReplayBuffer
    from torchbeast.core.storages.transition import Transitions as Transitions

__all__, __getattr__, __dir__ = importing(__name__)
