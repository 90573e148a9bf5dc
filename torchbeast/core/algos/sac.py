# SPDX-License-Identifier: Apache-2.0
"""SAC: soft actor-critic, with a learnt temperature alpha.

Continuous actions (Haarnoja et al. 2018, arXiv 1812.05905), a ~ pi(s) by reparametrisation:

    V(s)        = min_i Q_target_i(s, a) - alpha log pi(a | s)                     equation 3
    critic_loss = mean w 1/2 sum_i (Q_i(s, a) - y)^2,  y = R + gamma^m (1 - terminated) V(s')   5, 6
    actor_loss  = mean alpha log pi(a | s) - min_i Q_i(s, a)                       equation 9
    temperature_loss = -log alpha mean (log pi(a | s) + target entropy)            equation 18

Actions are in units of their box here: log pi is of tanh(u) in [-1, 1]. Equation 18
has log alpha in place of alpha, as in the authors' code.

Discrete actions (Christodoulou 2019, arXiv 1910.07207): the expectation over actions is exact,

    V(s) = sum_a pi(a | s) (min_i Q_target_i(s, a) - alpha log pi(a | s))          equation 10
    actor_loss = mean sum_a pi(a | s) (alpha log pi(a | s) - min_i Q_i(s, a))      equation 12

and the temperature's likewise (equation 11).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.distributions import Categorical, SquashedGaussian
from torchbeast.core.actors.off_policy import StochasticActorCritic
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import SACConfig
from torchbeast.core.algos.off_policy import ActorAndCritics, mean_loss, priorities
from torchbeast.core.base.nest import Nest
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import UsageError


class SAC(ActorAndCritics):
    """Soft actor-critic (Haarnoja et al. 2018) with twin critics and an automatic temperature.

    It trains on single steps from a replay, in Box action spaces, or in Discrete ones
    (Christodoulou 2019).

    Args:
        actor: A StochasticActorCritic, for example the built-in sac-mlp.
        config: The hyperparameters.

    Example:
        ```python
        SAC.create_factory(learning_rate=3e-4, target_rate=0.005, discounting=0.99)
        ```
    """

    Config = SACConfig
    family = "sac"
    actor_type: ClassVar = StochasticActorCritic
    minimised_by: ClassVar = {
        "critic_loss": "critics",
        "actor_loss": "actor",
        "temperature_loss": "temperature",
    }
    actor: StochasticActorCritic
    config: SACConfig

    def __init__(self, actor: Actor, config: SACConfig) -> None:
        super().__init__(actor, config, config.target_period)
        log_alpha = torch.tensor(math.log(config.temperature), device=self.actor.epsilon.device)
        self.temperature = nn.ParameterDict({"log_alpha": log_alpha})
        self.models["temperature"] = self.temperature
        without_decay = replace(config.optimiser, weight_decay=0.0)  # would pull alpha towards 1
        self.optimisers["temperature"] = without_decay.make(self.temperature.parameters())

    @classmethod
    def check_actor(cls, actor: Actor, config: SACConfig) -> None:
        """Checks in addition that expectations over the actions can be computed.

        Args:
            actor: The network to train.
            config: The hyperparameters.

        Raises:
            UsageError: If the actor has another distribution.
        """
        super().check_actor(actor, config)
        if not isinstance(actor.distribution, SquashedGaussian | Categorical):
            raise UsageError(
                f"SAC needs a network with a SquashedGaussian over a Box or a Categorical over a "
                f"Discrete, got {type(actor).__name__} with {type(actor.distribution).__name__}: "
                "use another model"
            )

    def schedule(self) -> dict[str, float]:
        """Sets the temperature, in addition, if it is not learnt."""
        if not self.config.learn_temperature:  # a checkpoint may have another
            self.temperature["log_alpha"].fill_(math.log(self.config.temperature))
        return super().schedule()

    def losses(self, minibatch: Transitions) -> Losses:
        """Returns the three losses, and the means of values, entropy and temperature."""
        alpha = self.temperature["log_alpha"].detach().exp()
        seen = minibatch.observation
        with torch.no_grad():
            after, log_probs = self._evaluate(self.target.network, minibatch.next_observation)
            targets = self.targets(minibatch, after - alpha * log_probs)
        values = self._values_of(seen, minibatch.action)
        errors = values - targets
        now, log_probs = self._evaluate(self.critics, seen)
        terms = {
            "critic_loss": mean_loss(0.5 * errors.square().sum(0), minibatch),
            "actor_loss": (alpha * log_probs - now).mean(),
        }
        if self.config.learn_temperature:
            surplus = -log_probs.detach().mean() - self._target_entropy(seen)
            terms["temperature_loss"] = self.temperature["log_alpha"] * surplus
        metrics = {
            "mean_value": values.detach().mean(),
            "entropy": -log_probs.detach().mean(),
            "temperature": alpha,
        }
        return Losses(terms, metrics, priorities(minibatch, errors))

    def _evaluate(self, critics: nn.Module, observation: Nest[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns means over the policy's actions [B], with gradients to the policy: the smaller
        value of both critics, and the log-probability (minus the entropy). Actions of a Box are
        sampled; of a Discrete the mean is over all actions.
        """
        distribution, params = self.actor.distribution, self.actor(observation).float()
        if isinstance(distribution, SquashedGaussian):
            action, log_probs = distribution.rsample(params)
            values: Tensor = critics(observation, distribution.features(action))
            return values.min(0).values, log_probs + distribution.log_half_widths
        log_probs = params.log_softmax(-1)
        probs = log_probs.exp()
        log_probs = log_probs.masked_fill(log_probs.isneginf(), 0.0)  # 0 log 0 = 0
        with torch.no_grad():
            values = critics(observation).min(0).values
        return (probs * values).sum(-1), (probs * log_probs).sum(-1)

    def _values_of(self, observation: Nest[Tensor], action: Nest[Tensor]) -> Tensor:
        """Returns the critics' values [2, B] of the actions that were taken."""
        features = self.actor.distribution.features(action)
        if isinstance(self.actor.distribution, SquashedGaussian):
            return self.critics(observation, features)
        return (self.critics(observation) * features).sum(-1)  # one-hot

    def _target_entropy(self, observation: Nest[Tensor]) -> float | Tensor:
        """Returns target_entropy. By default it is 0.98 log n of n discrete actions, the mean over
        the states where masks leave different numbers n.
        """
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        distribution, mask = self.actor.distribution, self.actor.action_mask
        if isinstance(distribution, SquashedGaussian):
            return -float(distribution.num_features)
        if mask is None:
            return 0.98 * math.log(distribution.num_params)
        return 0.98 * mask.num_allowed(observation).log().mean()
