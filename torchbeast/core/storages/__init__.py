# SPDX-License-Identifier: Apache-2.0
"""Containers of experience between acting and learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.storages.storage import (
        HindsightExperienceReplayBuffer as HindsightExperienceReplayBuffer,
    )
    from torchbeast.core.storages.storage import OnPolicyBuffer as OnPolicyBuffer
    from torchbeast.core.storages.storage import OnPolicyGAEBuffer as OnPolicyGAEBuffer
    from torchbeast.core.storages.storage import OnPolicyVTraceBuffer as OnPolicyVTraceBuffer
    from torchbeast.core.storages.storage import ReplayBuffer as ReplayBuffer

__all__ = [
    "HindsightExperienceReplayBuffer",
    "OnPolicyBuffer",
    "OnPolicyGAEBuffer",
    "OnPolicyVTraceBuffer",
    "ReplayBuffer",
]

__getattr__ = importing(__name__, dict.fromkeys(__all__, "storage"))
