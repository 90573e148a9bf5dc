# SPDX-License-Identifier: Apache-2.0
"""Advantage actor-critic: IMPALA without V-trace (Mnih et al. 2016, arXiv 1602.01783).

The algorithm treats the actions in rollouts as if the present policy had chosen them, so rollouts
should be recent. A diff between this file and torchbeast/core/algos/impala.py shows what V-trace
and masks for replay add.
"""

from __future__ import annotations

from torchbeast.core import losses, returns
from torchbeast.core.algos import Losses, OnPolicy
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.storages import Rollout


class AdvantageActorCritic(OnPolicy):
    """Advantage actor-critic on rollouts of the newest policy, with IMPALA's hyperparameters."""

    separable = True

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns pg_loss, baseline_loss and entropy_loss, times their costs, and the entropy."""
        config, distribution = self.config, self.actor.distribution
        policy_logits, values, final_values, _ = unroll(self.actor, minibatch)
        logits, values = policy_logits[:-1].float(), values.float()
        actions = map_leaves(lambda leaf: leaf[1:], minibatch.action)
        log_probs = distribution.log_prob(logits, actions)
        rewards, discounts = self.rewards_and_discounts(minibatch, final_values)
        vs = returns.value_targets(
            discounts=discounts,
            rewards=rewards,
            values=values[:-1],
            bootstrap_value=values[-1],
            mask=minibatch.mask,
        )
        how, mask = self.reduction, minibatch.mask
        advantages = vs - values[:-1]
        entropies = distribution.entropy(logits)
        terms = {
            "pg_loss": losses.policy_gradient_loss(log_probs, advantages, how, mask),
            "baseline_loss": config.baseline_cost * losses.baseline_loss(advantages, how, mask),
            "entropy_loss": config.entropy_cost * losses.entropy_loss(entropies, how, mask),
        }
        return Losses(terms, {"entropy": losses.mean(entropies, mask)})
