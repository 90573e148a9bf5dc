# SPDX-License-Identifier: Apache-2.0
"""Common parts of off-policy algorithms. DQN, SAC and TD3 share targets of n steps, target
networks, weights and priorities; DQN, PQN and R2D2 share exploration.

B is the number of transitions. With n-step returns R_b is the discounted sum of the m_b rewards of
transition b, m_b <= n, and its target is

    y_b = R_b + gamma^m_b (1 - terminated_b) V(next observation)
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, Mode
from torchbeast.core.actors.off_policy import ActorWithCritics, Exploring, OffPolicyActor
from torchbeast.core.algos.base import Algorithm, BatchT
from torchbeast.core.algos.config import ExplorationConfig, OffPolicyConfig
from torchbeast.core.envs.tasks import without_task
from torchbeast.core.losses import Mean, clip_rewards, mean
from torchbeast.core.storages.batch import NO_FEEDBACK, Feedback
from torchbeast.core.storages.transition import Transitions


class OffPolicy(Algorithm[Transitions]):
    """Base class of DQN, SAC and TD3: n-step targets from single steps of a replay.

    Args:
        actor: An OffPolicyActor.
        config: The hyperparameters.
    """

    takes = Transitions
    mode: Mode = "explore"
    reduction = "mean"
    actor_type: ClassVar = OffPolicyActor
    actor: OffPolicyActor
    config: OffPolicyConfig

    def targets(self, batch: Transitions, next_values: Tensor) -> Tensor:
        """Returns the n-step targets y [B].

        Args:
            batch: The transitions.
            next_values: [B] V of the next observations.
        """
        config = self.config
        rewards = batch.reward.unsqueeze(-1)
        if batch.later_rewards is not None:
            rewards = torch.cat([rewards, batch.later_rewards], -1)
        rewards = clip_rewards(rewards * config.reward_scale, config.reward_clipping)
        powers = config.discounting ** torch.arange(rewards.shape[1], device=rewards.device)
        num_joined = 1 if batch.num_joined is None else batch.num_joined
        discounts = config.discounting**num_joined * (1.0 - batch.terminated.float())
        return (rewards * powers).sum(-1) + discounts * next_values


class EpsilonGreedy(Algorithm[BatchT]):
    """Base class of DQN, PQN and R2D2: a network of action values that acts epsilon-greedily.

    Args:
        actor: The network.
        config: The hyperparameters, with an optimiser.
    """

    mode: Mode = "explore"
    separable = True
    reduction = "mean"
    actor: Exploring
    config: ExplorationConfig

    def __init__(self, actor: Actor, config: Any) -> None:
        super().__init__(actor, config)
        self.optimisers = {"actor": config.optimiser.make(actor.parameters())}

    def schedule(self) -> dict[str, float]:
        """Sets epsilon, the probability of random actions, which falls linearly from 1 with the
        number of steps that were collected until now; returns it as a metric.
        """
        share = min(1.0, self.counters.env_steps / self.config.exploration_steps)
        epsilon = 1.0 + share * (self.config.epsilon_end - 1.0)
        self.actor.epsilon.fill_(epsilon)
        return {"epsilon": epsilon}


class WithTarget(EpsilonGreedy[BatchT]):
    """Base class of DQN and R2D2, which have a target network.

    Args:
        actor: The network.
        config: The hyperparameters, with an optimiser and a target_period.
        rate: See Target.
    """

    def __init__(self, actor: Actor, config: Any, rate: float = 1.0) -> None:
        super().__init__(actor, config)
        self.target = Target(actor, rate, config.target_period)
        self.models["target"] = self.target

    def after_step(self) -> None:
        """Lets the target network follow the network."""
        self.target.follow(self.actor)


class Target(nn.Module):
    """Target network: a copy of a network that follows it by Polyak averaging (Lillicrap et al.
    2015, arXiv 1509.02971).

    Attributes:
        network: The copy, which is never trained itself.
        steps: int64 [], the number of calls of `follow`.
    """

    steps: Tensor

    def __init__(self, network: nn.Module, rate: float, period: int) -> None:
        """Copies a network.

        Args:
            network: The network to follow.
            rate: Polyak coefficient tau: copy = (1 - tau) * copy + tau * network.
            period: Calls of `follow` between two such updates.
        """
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._rate, self._period = rate, period

    @torch.no_grad()
    def follow(self, network: nn.Module) -> None:
        """Moves the copy towards the network, if it is time; running statistics are copied."""
        self.steps += 1
        if int(self.steps) % self._period:
            return
        torch._foreach_lerp_([*self.network.parameters()], [*network.parameters()], self._rate)
        for held, new in zip(self.network.buffers(), network.buffers(), strict=True):
            held.copy_(new)


def mean_loss(losses: Tensor, batch: Transitions) -> Tensor:
    """Returns the mean of losses [B], weighted where the batch has weights."""
    return losses.mean() if batch.weights is None else (batch.weights * losses).mean()


def value_metrics(values: Tensor, errors: Tensor, mask: Tensor | None) -> dict[str, Mean]:
    """Returns the mean value and the mean absolute error over the valid steps of [T, B]."""
    figures = {"mean_value": values.detach(), "value_error": errors.detach().abs()}
    return {name: mean(figure, mask) for name, figure in figures.items()}


@torch.no_grad()
def priorities(batch: Transitions, errors: Tensor) -> Feedback:
    """Returns the absolute TD errors as new priorities of the transitions, if the replay samples by
    priority (Schaul et al. 2016, arXiv 1511.05952, section 3.3).

    Args:
        batch: The transitions.
        errors: [B], or [N, B] of N critics, whose absolute errors are averaged.
    """
    if batch.weights is None:
        return NO_FEEDBACK
    return Feedback(priorities=errors.abs().reshape(-1, errors.shape[-1]).mean(0))


class ActorAndCritics(OffPolicy):
    """Base class of SAC and TD3: a policy with critics, and random actions until the first update.

    Args:
        actor: An ActorWithCritics.
        config: The hyperparameters.
        target_period: Optimiser steps between two moves of the target critics.
    """

    actor: ActorWithCritics

    def __init__(self, actor: Actor, config: OffPolicyConfig, target_period: int) -> None:
        super().__init__(actor, config)
        self.critics = self.actor.make_critics().to(self.actor.epsilon.device)
        self.target = Target(self.critics, config.target_rate, target_period)
        self.models |= {"critics": self.critics, "target": self.target}
        self.optimisers = {
            "actor": config.optimiser.make(actor.parameters()),
            "critics": config.optimiser.make(self.critics.parameters()),
        }

    def observe(self, batch: Transitions) -> None:
        """Adds the batch to the running statistics of the actor and the critics."""
        super().observe(batch)
        self.critics.observe(without_task(batch.new_observations()))

    def schedule(self) -> dict[str, float]:
        """Ends acting at random after the first update."""
        if self.counters.version:
            self.actor.epsilon.zero_()
        return {}

    def after_step(self) -> None:
        """Lets the target critics follow the critics."""
        self.target.follow(self.critics)
