# SPDX-License-Identifier: Apache-2.0
"""The parts of the actor-critic loss."""

from __future__ import annotations

import math

import pytest
import torch

from torchbeast.core import losses

T, B = 4, 3


def test_the_policy_gradient_loss_is_minus_log_prob_times_advantage() -> None:
    log_probs, advantages = torch.randn(T, B), torch.randn(T, B)
    expected = -sum(log_probs[t, b] * advantages[t, b] for t in range(T) for b in range(B))
    torch.testing.assert_close(losses.policy_gradient_loss(log_probs, advantages), expected)


def test_no_gradient_flows_into_the_advantages() -> None:
    log_probs = torch.randn(T, B, requires_grad=True)
    advantages = torch.randn(T, B, requires_grad=True)
    losses.policy_gradient_loss(log_probs, advantages).backward()
    assert advantages.grad is None
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, -advantages.detach())


def test_the_baseline_loss_is_half_the_sum_of_squares() -> None:
    assert losses.baseline_loss(torch.tensor([[3.0, -1.0]])).item() == 5.0


def test_the_entropy_loss_is_lowest_where_the_entropy_is_highest() -> None:
    assert losses.entropy_loss(torch.tensor([[0.5, 2.0]])).item() == -2.5


@pytest.mark.parametrize("loss", [losses.baseline_loss, losses.entropy_loss])
def test_the_mean_is_the_sum_over_time_and_batch_divided(loss: object) -> None:
    assert callable(loss)
    values = torch.randn(T, B)
    torch.testing.assert_close(loss(values, "mean") * (T * B), loss(values, "sum"))


def test_abs_one_clips_rewards_and_none_leaves_them() -> None:
    rewards = torch.tensor([-5.0, -0.5, 0.5, 5.0])
    assert losses.clip_rewards(rewards, "abs_one").tolist() == [-1.0, -0.5, 0.5, 1.0]
    assert losses.clip_rewards(rewards, "none").tolist() == rewards.tolist()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_masked_step_holds_reaches_neither_losses_nor_gradients(
    reduction: losses.Reduction, bad: float
) -> None:
    mask = torch.ones(T, B, dtype=torch.bool)
    mask[1, 2] = mask[3, 0] = False

    def results(hidden: float) -> list[torch.Tensor]:
        torch.manual_seed(1)
        log_probs, advantages, errors, entropies = torch.randn(4, T, B).where(mask, hidden)
        leaves = [log_probs.requires_grad_(), errors.requires_grad_(), entropies.requires_grad_()]
        terms = [
            losses.policy_gradient_loss(log_probs, advantages, reduction, mask),
            losses.baseline_loss(errors, reduction, mask),
            losses.entropy_loss(entropies, reduction, mask),
        ]
        return [*terms, *torch.autograd.grad(torch.stack(terms).sum(), leaves)]

    found = results(bad)
    assert all(tensor.isfinite().all() for tensor in found)
    torch.testing.assert_close(found, results(0.0), rtol=0, atol=0)


def test_a_mean_is_of_the_steps_of_its_mask_and_counts_them() -> None:
    values, mask = torch.randn(T, B), torch.rand(T, B) < 0.5
    assert 0 < mask.sum() < T * B
    total, steps = losses.mean(values.where(mask, math.nan), mask)
    torch.testing.assert_close(total / steps, values[mask].mean())
    total, steps = losses.mean(values)
    torch.testing.assert_close(total / steps, values.mean())
    assert losses.mean(values, mask & False) == (0.0, 0)


def test_both_masks_hold_where_each_does_and_none_holds_everywhere() -> None:
    first, second = torch.rand(2, T, B) < 0.5
    assert losses.both(first, second).equal(first & second)
    assert losses.both(None, second) is second
