# SPDX-License-Identifier: Apache-2.0
"""Resolves `--reward_clipping auto` by the environment.

Atari games have scores of very different sizes, from 1 in Pong to thousands, so their rewards are
clipped. Elsewhere the size of a reward is meaningful: clipping makes Taxi's -10 for a forbidden
action equal to the -1 of every other step.
"""

from __future__ import annotations

from typing import Literal

from torchbeast.core.specs import RewardClipping
from torchbeast.envs.atari import is_atari

UNKNOWN = "unknown"  # environment of servers of the original TorchBeast, which do not name it


def resolved(clipping: Literal["auto", RewardClipping], env_id: str) -> RewardClipping:
    """Returns the clipping to use; "auto" is resolved by the environment.

    With an unknown environment rewards are clipped, the default of the original's learner.
    """
    if clipping != "auto":
        return clipping
    return "abs_one" if env_id == UNKNOWN or is_atari(env_id) else "none"


def sentence(clipping: str) -> str:
    """Returns a sentence about the clipping, for the start of a run."""
    how = {"abs_one": "clipped to [-1, 1]", "none": "as they are"}[clipping]
    return f"Learning from rewards {how} (--reward_clipping {clipping})."
