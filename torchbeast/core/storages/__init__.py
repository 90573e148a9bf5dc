# SPDX-License-Identifier: Apache-2.0
"""Containers of experience between acting and learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.lazy import importing

if TYPE_CHECKING:
    from torchbeast.core.storages.off_policy import (
        HindsightExperienceReplayBuffer as HindsightExperienceReplayBuffer,
    )
    from torchbeast.core.storages.off_policy import ReplayBuffer as ReplayBuffer
    from torchbeast.core.storages.on_policy import OnPolicyBuffer as OnPolicyBuffer
    from torchbeast.core.storages.on_policy import OnPolicyGAEBuffer as OnPolicyGAEBuffer
    from torchbeast.core.storages.on_policy import OnPolicyVTraceBuffer as OnPolicyVTraceBuffer

__all__ = [
    "HindsightExperienceReplayBuffer",
    "OnPolicyBuffer",
    "OnPolicyGAEBuffer",
    "OnPolicyVTraceBuffer",
    "ReplayBuffer",
]

_FOUND_IN = {
    "HindsightExperienceReplayBuffer": "off_policy",
    "OnPolicyBuffer": "on_policy",
    "OnPolicyGAEBuffer": "on_policy",
    "OnPolicyVTraceBuffer": "on_policy",
    "ReplayBuffer": "off_policy",
}

__getattr__ = importing(__name__, _FOUND_IN)
