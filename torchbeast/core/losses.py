# SPDX-License-Identifier: Apache-2.0
"""The losses of actor-critics, and reward clipping.

T is time, B is batch. By default every loss is summed over both, as in IMPALA; reduction "mean"
makes the learning rate independent of T * B. Where a mask [T, B] is given, steps at which it is
false count for nothing, whatever they hold: a NaN there reaches neither losses nor gradients.
Losses are scalars.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchbeast.core.base.checks import one_of
from torchbeast.core.base.specs import RewardClipping

Reduction = Literal["sum", "mean"]


class Mean(NamedTuple):
    """A mean over some steps, whose parts are added up over slices before they are divided.

    Attributes:
        total: [], the sum over the steps.
        steps: [], the number of steps; a mean over 0 steps is not logged.
    """

    total: Tensor
    steps: Tensor


def policy_gradient_loss(
    action_log_probs: Tensor,
    advantages: Tensor,
    reduction: Reduction = "sum",
    mask: Tensor | None = None,
) -> Tensor:
    """Policy gradient: returns -log pi(a) * advantage, reduced to a scalar.

    Args:
        action_log_probs: [T, B], log pi(a).
        advantages: [T, B]; no gradient flows into them.
        reduction: Whether to "sum" the steps, or take their "mean".
        mask: bool [T, B], the steps that count. None: all.
    """
    log_probs, advantages = masked(action_log_probs, mask), masked(advantages.detach(), mask)
    return _reduce(-log_probs * advantages, reduction, mask)


def baseline_loss(
    errors: Tensor, reduction: Reduction = "sum", mask: Tensor | None = None
) -> Tensor:
    """Value loss: returns 0.5 * (vs - V)^2, reduced to a scalar.

    Args:
        errors: [T, B], vs - V.
        reduction: Whether to "sum" the steps, or take their "mean".
        mask: bool [T, B], the steps that count. None: all.
    """
    return 0.5 * _reduce(masked(errors, mask).square(), reduction, mask)


def clipped_policy_loss(
    log_ratios: Tensor,
    advantages: Tensor,
    clip: float,
    reduction: Reduction = "sum",
    mask: Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), reduced to a scalar.

        -min(r * advantage, clamp(r, 1 - clip, 1 + clip) * advantage)

    Moving a ratio r further than clip in the direction of the advantage gains nothing.

    Args:
        log_ratios: [T, B], log r with r = pi(a) / mu(a).
        advantages: [T, B]; no gradient flows into them.
        clip: The clip range epsilon.
        reduction: Whether to "sum" the steps, or take their "mean".
        mask: bool [T, B], the steps that count. None: all.
    """
    ratios, advantages = masked(log_ratios, mask).exp(), masked(advantages.detach(), mask)
    clipped = ratios.clamp(1.0 - clip, 1.0 + clip)
    return -_reduce(torch.minimum(ratios * advantages, clipped * advantages), reduction, mask)


def clipped_baseline_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    clip: float,
    reduction: Reduction = "sum",
    mask: Tensor | None = None,
) -> Tensor:
    """PPO's clipped value loss, reduced to a scalar.

        0.5 * max((vs - V)^2, (vs - clamp(V, V_old - clip, V_old + clip))^2)

    Moving a value further than clip towards its target gains nothing.

    Args:
        values: [T, B], V.
        old_values: [T, B], V_old; no gradient flows into them.
        targets: [T, B], vs; no gradient flows into them.
        clip: The clip range, in units of returns.
        reduction: Whether to "sum" the steps, or take their "mean".
        mask: bool [T, B], the steps that count. None: all.
    """
    old_values, targets = old_values.detach(), targets.detach()
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    squares = torch.maximum(
        masked(targets - values, mask).square(), masked(targets - clipped, mask).square()
    )
    return 0.5 * _reduce(squares, reduction, mask)


def entropy_loss(
    entropies: Tensor, reduction: Reduction = "sum", mask: Tensor | None = None
) -> Tensor:
    """Returns the negative entropy, reduced to a scalar.

    Args:
        entropies: [T, B], in nats.
        reduction: Whether to "sum" the steps, or take their "mean".
        mask: bool [T, B], the steps that count. None: all.
    """
    return -_reduce(masked(entropies, mask), reduction, mask)


def clip_rewards(rewards: Tensor, clipping: str) -> Tensor:
    """Returns rewards clipped to [-1, 1], or unchanged.

    Args:
        rewards: Of any shape.
        clipping: "abs_one" to clip them, or "none".

    Raises:
        ValueError: For anything else, such as an "auto" that was not resolved.
    """
    if clipping == "none":
        return rewards
    one_of(get_args(RewardClipping), reward_clipping=clipping)
    return rewards.clamp(-1.0, 1.0)


def mean(values: Tensor, mask: Tensor | None = None) -> Mean:
    """Returns the mean over some steps, as a metric of Losses.

    Args:
        values: [T, B].
        mask: bool [T, B], the steps that count. None: all.
    """
    steps = values.new_full((), values.numel()) if mask is None else mask.sum()
    return Mean(masked(values, mask).sum(), steps)


def both(mask: Tensor | None, other: Tensor) -> Tensor:
    """Returns where both masks are true.

    Args:
        mask: bool, or None, which is true everywhere.
        other: bool of the same shape.
    """
    return other if mask is None else mask & other


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Returns values with 0 where the mask is false.

    Call it before any product: 0 times NaN is NaN, in a gradient too.

    Args:
        values: [T, B, ...].
        mask: bool with as many dimensions as values. None: all true.
    """
    return values if mask is None else values.where(mask, 0.0)


def _reduce(losses: Tensor, reduction: Reduction, mask: Tensor | None) -> Tensor:
    """Returns the sum of losses that are 0 where the mask is false, or their mean elsewhere."""
    if reduction == "sum":
        return losses.sum()
    return losses.mean() if mask is None else losses.sum() / mask.sum().clamp(min=1)
