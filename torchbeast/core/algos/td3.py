# SPDX-License-Identifier: Apache-2.0
"""TD3: twin delayed deterministic policy gradients (Fujimoto, van Hoof, Meger 2018, arXiv
1802.09477, algorithm 1). Actions are in units of their box, [-1, 1].

    a'          = clip(pi_target(s') + clip(noise, -c, c), -1, 1),  noise ~ Normal(0, target_noise)
    y           = R + gamma^m (1 - terminated) min_i Q_target_i(s', a')
    critic_loss = mean w 1/2 sum_i (Q_i(s, a) - y)^2
    actor_loss  = -mean Q_1(s, pi(s))               every policy_period-th optimiser step

The targets of policy and critics move with the policy.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.off_policy import DeterministicActorCritic
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import TD3Config
from torchbeast.core.algos.off_policy import ActorAndCritics, Target, mean_loss, priorities
from torchbeast.core.envs.tasks import without_task
from torchbeast.core.storages.transition import Transitions


class TD3(ActorAndCritics):
    """Twin delayed DDPG (Fujimoto et al. 2018): a deterministic policy and two critics.

    It trains on single steps from a replay, in Box action spaces.

    Args:
        actor: A DeterministicActorCritic, for example the built-in td3-mlp.
        config: The hyperparameters.

    Example:
        ```python
        TD3.create_factory(learning_rate=3e-4, exploration_noise=0.1, policy_period=2)
        ```
    """

    Config = TD3Config
    family = "td3"
    actor_type: ClassVar = DeterministicActorCritic
    minimised_by: ClassVar = {"critic_loss": "critics", "actor_loss": "actor"}
    actor: DeterministicActorCritic
    config: TD3Config

    def __init__(self, actor: Actor, config: TD3Config) -> None:
        period = config.target_period * config.policy_period
        super().__init__(actor, config, period)
        self.target_actor = Target(self.actor, config.target_rate, period)
        self.models["target_actor"] = self.target_actor

    def schedule(self) -> dict[str, float]:
        """Sets the exploration noise, in addition."""
        self.actor.noise.fill_(self.config.exploration_noise)  # a checkpoint may have another
        return super().schedule()

    def losses(self, minibatch: Transitions) -> Losses:
        """Returns critic_loss, in every policy_period-th step actor_loss, and the mean value."""
        seen, distribution = minibatch.observation, self.actor.distribution
        with torch.no_grad():
            after = self.target.network(minibatch.next_observation, self._next_units(minibatch))
            targets = self.targets(minibatch, after.min(0).values)
        values = self.critics(seen, distribution.features(minibatch.action))
        errors = values - targets
        terms = {"critic_loss": mean_loss(0.5 * errors.square().sum(0), minibatch)}
        if (int(self.target.steps) + 1) % self.config.policy_period == 0:
            terms["actor_loss"] = -self.critics.first(
                without_task(seen), self.actor(seen).tanh()
            ).mean()
        metrics = {"mean_value": values.detach().mean()}
        return Losses(terms, metrics, priorities(minibatch, errors))

    def _next_units(self, minibatch: Transitions) -> Tensor:
        """Returns the target policy's actions with clipped noise, [B, n]."""
        units = self.target_actor.network(minibatch.next_observation).tanh()
        limit = self.config.target_noise_clip
        noise = (self.config.target_noise * torch.randn_like(units)).clamp(-limit, limit)
        return (units + noise).clamp(-1.0, 1.0)

    def after_step(self) -> None:
        """Lets the targets follow, when it is time."""
        super().after_step()
        self.target_actor.follow(self.actor)
