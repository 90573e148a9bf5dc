# SPDX-License-Identifier: Apache-2.0
"""What `--reward_clipping auto` means, once it is known what is played.

Games of Atari count in units of their own, from 1 in Pong to thousands, so their rewards are
clipped. Elsewhere the size of a reward says something: clipped, Taxi's -10 for a forbidden action
is the same as the -1 of every other step.
"""

from __future__ import annotations

from typing import Literal

from torchbeast.core.losses import RewardClipping
from torchbeast.envs.atari import is_atari

UNKNOWN = "unknown"  # what servers of the original TorchBeast serve, which do not say


def resolved(clipping: RewardClipping | Literal["auto"], env_id: str) -> RewardClipping:
    """What is asked for, or what "auto" means in this environment. The original's learner clips
    unless told otherwise.
    """
    if clipping != "auto":
        return clipping
    return "abs_one" if env_id == UNKNOWN or is_atari(env_id) else "none"


def sentence(clipping: str) -> str:
    """What is done to rewards, for the start of a run."""
    how = {"abs_one": "clipped to [-1, 1]", "none": "as they are"}[clipping]
    return f"Learning from rewards {how} (--reward_clipping {clipping})."
