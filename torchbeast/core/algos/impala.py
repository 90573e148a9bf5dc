# SPDX-License-Identifier: Apache-2.0
"""IMPALA: actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561).

    total = sum -log pi(a) * advantage + baseline_cost * 0.5 * sum (vs - V)^2 + entropy_cost * sum
    pi log pi

Policy and value of rows 0..T-1 belong to the actions, rewards and dones of rows 1..T; V of row T is
the bootstrap. The optimiser is RMSprop as in PyTorch: epsilon is added to the root and the running
square starts at 0. TensorFlow's has epsilon inside the root and starts at 1, so settings of
TensorFlow programs do not carry over as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from torchbeast.core import losses, vtrace
from torchbeast.core.actors.contract import Actor, ActorCritic
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.rmsprop import RMSprop
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.nest_py import map_leaves
from torchbeast.core.storages.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig:
    """Settings of the loss and the optimiser. A step is an agent step: four frames in Atari."""

    discounting: float = 0.99  # gamma, per step
    entropy_cost: float = 0.0006  # weight of the negative entropy
    baseline_cost: float = 0.5  # weight of the value loss
    reward_scale: float = 1.0  # of rewards in the loss, before they are clipped
    reward_clipping: losses.RewardClipping = "abs_one"  # rewards in the loss; logs have them raw
    learning_rate: float = 0.00048  # at the start
    alpha: float = 0.99  # RMSprop's smoothing
    momentum: float = 0.0  # RMSprop's momentum
    epsilon: float = 0.01  # RMSprop's epsilon
    grad_norm_clipping: float = 40.0  # largest norm of the gradient
    total_steps: int = 100_000  # steps over which the learning rate goes to 0
    warmup_steps: int = 0  # steps over which it also grows from 0, at the start
    loss_reduction: losses.Reduction = "sum"  # over time and batch
    bytes_at_once: int | None = None  # of observations in one backward; None: all
    num_threads: int = 1  # that learn pieces at the same time. Both: speed and last digits only

    def __post_init__(self) -> None:
        _check_choice("reward_clipping", self.reward_clipping, get_args(losses.RewardClipping))
        _check_choice("loss_reduction", self.loss_reduction, get_args(losses.Reduction))
        if not 0 <= self.discounting <= 1:
            raise ValueError(f"discounting must be in [0, 1], got {self.discounting}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        for name in ("learning_rate", "grad_norm_clipping", "reward_scale", "total_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class Impala(Algorithm):
    """Learns from rollouts of any recent policy."""

    needs = ("policy_logits",)

    def __init__(
        self, model: Actor, distribution: ActionDistribution, config: ImpalaConfig
    ) -> None:
        if not isinstance(model, ActorCritic):
            raise TypeError(f"Impala learns an actor-critic, got a {type(model).__name__}")
        optimizer = RMSprop(
            model.parameters(),
            lr=config.learning_rate,
            alpha=config.alpha,
            momentum=config.momentum,
            eps=config.epsilon,
        )
        super().__init__(
            model,
            optimizer,
            total_steps=config.total_steps,
            warmup_steps=config.warmup_steps,
            grad_norm_clipping=config.grad_norm_clipping,
            loss_reduction=config.loss_reduction,
            bytes_at_once=config.bytes_at_once,
            num_threads=config.num_threads,
        )
        self._distribution = distribution
        self._config = config

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learns from a batch; what Algorithm.update returns, and the policy's mean entropy."""
        figures = super().update(rollout)
        return figures | {"entropy": self._entropy(figures["entropy_loss"], rollout.num_steps)}

    def _entropy(self, loss: float, num_steps: int) -> float:
        """Nats a step, of the loss that it was weighted into; NaN where its weight is 0."""
        config = self._config
        summed = num_steps if config.loss_reduction == "sum" else 1
        return -loss / (config.entropy_cost * summed) if config.entropy_cost else math.nan

    def losses(self, rollout: Rollout) -> dict[str, Tensor]:
        """pg_loss, baseline_loss and entropy_loss, with their costs."""
        config, distribution = self._config, self._distribution
        policy_logits, values, final_values = unroll(self.model, rollout)
        logits, values = policy_logits[:-1].float(), values.float()
        actions = map_leaves(lambda leaf: leaf[1:], rollout.action)
        log_probs = distribution.log_prob(logits, actions)
        behavior_logits = rollout.extras["policy_logits"][1:].float()
        behavior_log_probs = distribution.log_prob(behavior_logits, actions)
        rewards, discounts = self._rewards_and_discounts(rollout, final_values)
        vs, advantages = vtrace.from_importance_weights(
            log_rhos=log_probs - behavior_log_probs,
            discounts=discounts,
            rewards=rewards,
            values=values[:-1],
            bootstrap_value=values[-1],
        )
        how = config.loss_reduction
        entropies = distribution.entropy(logits)
        return {
            "pg_loss": losses.policy_gradient_loss(log_probs, advantages, how),
            "baseline_loss": config.baseline_cost * losses.baseline_loss(vs - values[:-1], how),
            "entropy_loss": config.entropy_cost * losses.entropy_loss(entropies, how),
        }

    def _rewards_and_discounts(
        self, rollout: Rollout, final_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[T, B] each. The discount is 0 where an episode ended, truncated ones add their value.

        This is exact: the recursion only ever sees r + gamma * V, and stops where the discount is
        0.
        """
        scaled = self._config.reward_scale * rollout.reward[1:]
        rewards = losses.clip_rewards(scaled, self._config.reward_clipping)
        discounts = self._config.discounting * (1.0 - rollout.done[1:].float())
        return rewards + self._config.discounting * final_values, discounts


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
