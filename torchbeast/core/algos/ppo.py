# SPDX-License-Identifier: Apache-2.0
"""PPO: several epochs on each batch, with clipped ratios (Schulman et al. 2017, arXiv 1707.06347).

    total = -mean min(r A, clamp(r, 1 - clip, 1 + clip) A) + baseline_cost * 0.5 * mean (vs - V)^2
            + entropy_cost * mean pi log pi,      r = pi(a) / mu(a)

mu is the policy that chose the action, which travels with the rollout and stays the same in all
epochs. Advantages A (GAE) and targets vs = V + A are computed once per batch, by the weights before
its first optimiser step. With use_clipped_value_loss, the error of a value is the larger one of
(vs - V)^2 and (vs - V_clipped)^2, where V_clipped is within clip of the V before that step. Policy
and value of rows 0..T-1 belong to the actions, rewards and dones of rows 1..T; V of row T is the
bootstrap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from torchbeast.core import losses, returns
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import PPOConfig
from torchbeast.core.algos.on_policy import OnPolicy, chosen, shuffled
from torchbeast.core.algos.unroll import policies_and_values, unroll
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.losses import Mean
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError


class PPO(OnPolicy):
    """Proximal policy optimisation (Schulman et al. 2017): clipped ratios, GAE, several epochs.

    It trains on rollouts of the newest policy, in every action space, with feed-forward and
    recurrent networks. One epoch of one minibatch is A2C.

    Args:
        actor: An ActorCritic.
        config: The hyperparameters.

    Example:
        ```python
        PPO.create_factory(learning_rate=1e-3, num_epochs=10, num_mini_batch=4, clip_param=0.2)
        ```
    """

    Config = PPOConfig
    network: ClassVar = {"shared_body": None, "orthogonal": True, "state_deviation": False}
    needs = ("policy_logits",)
    separable = True
    reduction = "mean"
    config: PPOConfig

    def prepare(self, batch: Rollout) -> Rollout:
        """Adds advantages, old_values and value_targets to the extras, [T+1, B] like the actions
        that they belong to.
        """
        config = self.config
        _, values, final_values, _ = self.scale.unrolled(unroll(self.actor, batch), batch)
        values, bootstrap_value = values[:-1], values[-1]
        rewards, discounts = self.rewards_and_discounts(batch, final_values)
        advantages = returns.gae(
            rewards=rewards,
            values=values,
            bootstrap_value=bootstrap_value,
            discounts=discounts,
            lambda_=config.gae_lambda,
            mask=batch.mask,
        )
        targets = values + advantages
        return batch.with_extras(advantages=advantages, old_values=values, value_targets=targets)

    def metrics(self, batch: Rollout) -> Mapping[str, Tensor]:
        """Returns explained_variance, 1 - var(vs - V) / var(vs), unless all vs are equal: 1 for
        perfect values, 0 for values that say nothing.
        """
        targets = chosen(batch.extras["value_targets"][1:], batch.mask)
        errors = chosen(batch.extras["advantages"][1:], batch.mask)
        variance = targets.var(correction=0) if len(targets) else 0.0
        if not variance > 0:
            return {}
        return {"explained_variance": 1.0 - errors.var(correction=0) / variance}

    def minibatches(self, batch: Rollout) -> Iterator[Rollout]:
        """Yields num_mini_batch parts of the batch for each epoch, shuffled again: single steps, or
        with a recurrent network whole columns.
        """
        self._check_size(batch)
        for _ in range(self.config.num_epochs):
            for minibatch in shuffled(batch, self.config.num_mini_batch):
                advantages = self.scale.scaled(minibatch.extras["advantages"], minibatch)
                if self.config.normalise_advantages:
                    known, valid = self.scale.known(advantages, minibatch), minibatch.mask
                    valid = valid if known is None else losses.both(valid, known[1:])
                    # Nothing is learnt from the others.
                    advantages = losses.masked(_normalised(advantages, valid), known)
                extras = {**minibatch.extras, "advantages": advantages}
                yield dataclasses.replace(minibatch, extras=extras)

    def _check_size(self, batch: Rollout) -> None:
        """Raises UsageError if minibatches had a single step, whose normal advantage is 0."""
        is_recurrent, parts = bool(flatten(batch.initial_agent_state)), self.config.num_mini_batch
        steps_each = batch.unroll_length if is_recurrent else 1
        count = batch.unroll_length * batch.batch_size // steps_each
        if self.config.normalise_advantages and count // parts * steps_each == 1:
            raise UsageError(
                f"num_mini_batch {parts} leaves one step per minibatch, whose normalised advantage "
                "is always 0: use a smaller num_mini_batch, a larger batch_size or unroll_length, "
                "or turn normalise_advantages off"
            )

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns pg_loss, baseline_loss and entropy_loss, each with its weight, the mean entropy,
        and the distance of the policy from the one that acted.
        """
        config, distribution = self.config, self.actor.distribution
        policy_logits, values = policies_and_values(self.actor, minibatch)
        logits = policy_logits.float()
        actions = map_leaves(lambda leaf: leaf[1:], minibatch.action)
        extras = {name: leaf[1:].float() for name, leaf in minibatch.extras.items()}
        behavior_log_probs = distribution.log_prob(extras["policy_logits"], actions)
        log_ratios = distribution.log_prob(logits, actions) - behavior_log_probs
        entropies = distribution.entropy(logits)
        how, mask, clip = self.reduction, minibatch.mask, config.clip_param
        pg_loss = losses.clipped_policy_loss(log_ratios, extras["advantages"], clip, how, mask)
        terms = {
            "pg_loss": pg_loss,
            "baseline_loss": config.baseline_cost
            * self._baseline_loss(values.float(), extras, minibatch),
            "entropy_loss": config.entropy_cost * losses.entropy_loss(entropies, how, mask),
        }
        ratios = _of_ratios(log_ratios.detach(), clip, mask)
        moments = self.scale.moments(extras["value_targets"], minibatch, mask)
        return Losses(terms, {"entropy": losses.mean(entropies, mask), **ratios, **moments})

    def _baseline_loss(
        self, values: Tensor, extras: Mapping[str, Tensor], minibatch: Rollout
    ) -> Tensor:
        how, mask, clip = self.reduction, minibatch.mask, self.config.clip_param
        targets = self.scale.normal(extras["value_targets"], minibatch)
        values = losses.masked(values, self.scale.known(values, minibatch))  # as the targets
        if self.config.use_clipped_value_loss:
            old_values = self.scale.normal(extras["old_values"], minibatch)
            return losses.clipped_baseline_loss(values, old_values, targets, clip, how, mask)
        return losses.baseline_loss(targets - values, how, mask)

    def stops_after(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the policy has moved further than target_kl from the one that acted."""
        limit = self.config.target_kl
        return limit is not None and metrics.get("approx_kl", 0.0) > limit


def _of_ratios(log_ratios: Tensor, clip: float, mask: Tensor | None) -> dict[str, Mean]:
    """Returns metrics of log_ratios [T, B], each over the valid steps: approx_kl, an estimate of
    KL(mu || pi) that is never negative, mean (r - 1) - log r; clip_fraction, the share of ratios r
    further than clip from 1; the mean of r, which is 1 but for chance, and of |r - 1|.
    """
    log_ratios = losses.masked(log_ratios, mask)
    ratios = log_ratios.exp()
    distances = (ratios - 1.0).abs()
    metrics = {
        "approx_kl": ratios - 1.0 - log_ratios,
        "clip_fraction": (distances > clip).float(),
        "ratio": ratios,
        "ratio_distance": distances,
    }
    return {name: losses.mean(metric, mask) for name, metric in metrics.items()}


def _normalised(advantages: Tensor, valid: Tensor | None) -> Tensor:
    """Returns advantages [T+1, B] with mean 0 and deviation 1 over the valid steps [T, B]."""
    seen = chosen(advantages[1:], valid)
    if not len(seen):
        return advantages
    return (advantages - seen.mean()) / (seen.std(correction=0) + 1e-8)
