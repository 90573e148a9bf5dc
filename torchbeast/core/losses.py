# SPDX-License-Identifier: Apache-2.0
"""The three losses of an actor-critic, and the clipping of rewards.

Every loss is summed over time and batch by default, as in IMPALA; "mean" decouples the learning
rate from T * B.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Reduction = Literal["sum", "mean"]
RewardClipping = Literal["abs_one", "none"]


def policy_gradient_loss(
    action_log_probs: Tensor, advantages: Tensor, reduction: Reduction = "sum"
) -> Tensor:
    """-log pi(a) * advantage; [T, B] each. No gradient flows into the advantages."""
    return _reduce(-action_log_probs * advantages.detach(), reduction)


def baseline_loss(errors: Tensor, reduction: Reduction = "sum") -> Tensor:
    """0.5 * (vs - V)^2 of the value errors [T, B]."""
    return 0.5 * _reduce(errors.square(), reduction)


def entropy_loss(entropies: Tensor, reduction: Reduction = "sum") -> Tensor:
    """sum pi log pi, the negative entropy; entropies [T, B]."""
    return -_reduce(entropies, reduction)


def clip_rewards(rewards: Tensor, clipping: RewardClipping) -> Tensor:
    """The rewards the losses see: in [-1, 1] for "abs_one", as they are for "none"."""
    return rewards.clamp(-1.0, 1.0) if clipping == "abs_one" else rewards


def _reduce(losses: Tensor, reduction: Reduction) -> Tensor:
    return losses.sum() if reduction == "sum" else losses.mean()
