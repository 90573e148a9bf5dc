# SPDX-License-Identifier: Apache-2.0
"""Double DQN (van Hasselt, Guez, Silver 2016, arXiv 1509.06461).

    y = R + gamma^m (1 - terminated) Q_target(s', argmax_a Q(s', a))              their equation 4
    loss = mean w rho(y - Q(s, a)),   rho(x) = x^2 / 2, where |x| > d = huber_delta d (|x| - d/2)

The target network is copied every target_period optimiser steps (Mnih et al. 2015). Actions are
epsilon-greedy; epsilon falls linearly over the steps that are collected.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.off_policy import QNetwork, discrete
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import DQNConfig
from torchbeast.core.algos.off_policy import OffPolicy, WithTarget, mean_loss, priorities
from torchbeast.core.base.nest import Nest
from torchbeast.core.storages.transition import Transitions


class DQN(WithTarget[Transitions], OffPolicy):
    """Deep Q-network (Mnih et al. 2015) with double Q-learning, n-step returns and priorities.

    It acts epsilon-greedily in Discrete action spaces, and trains on single steps from a replay.

    Args:
        actor: A QNetwork, for example the built-in q-mlp.
        config: The hyperparameters.

    Example:
        ```python
        DQN.create_factory(learning_rate=1e-4, exploration_steps=50_000, target_period=1_000)
        ```
    """

    Config = DQNConfig
    family = "q"
    actor_type: ClassVar = QNetwork
    actor: QNetwork
    config: DQNConfig

    def __init__(self, actor: Actor, config: DQNConfig) -> None:
        super().__init__(actor, config, config.target_rate)

    def losses(self, minibatch: Transitions) -> Losses:
        """Returns value_loss, and as metrics the mean value and the mean absolute TD error."""
        with torch.no_grad():
            targets = self.targets(minibatch, self._next_values(minibatch.next_observation))
        q_values = self.actor(minibatch.observation).float()
        values = discrete(self.actor).chosen(q_values, minibatch.action)
        delta = math.inf if self.config.huber_delta is None else self.config.huber_delta
        losses = F.huber_loss(values, targets, reduction="none", delta=delta)
        metrics = {
            "mean_value": values.detach().mean(),
            "value_error": (targets - values.detach()).abs().mean(),
        }
        terms = {"value_loss": mean_loss(losses, minibatch)}
        return Losses(terms, metrics, priorities(minibatch, targets - values))

    def _next_values(self, observation: Nest[Tensor]) -> Tensor:
        """Returns what the target network says of the best actions [B]."""
        rated = self.target.network(observation).float()
        chosen = self.actor(observation) if self.config.double_dqn else rated
        return rated.gather(-1, chosen.argmax(-1, keepdim=True)).squeeze(-1)


DDQN = DQN
