# SPDX-License-Identifier: Apache-2.0
"""A toy off-policy algorithm: two optimisers, a target network, and transitions of a replay.

Of a state s the actor chooses w s; the critic says u s + v a of an action a.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Acted, Actor, Mode, ModelInputs
from torchbeast.core.algos.base import Algorithm, Losses
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.storages.transition import Transitions

DISCOUNT, TAU, ACTOR_RATE, CRITIC_RATE = 0.5, 0.25, 0.01, 0.1


class LinearActor(Actor):
    """Chooses w s."""

    separable = True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))

    def forward(self, observation: Tensor) -> Tensor:
        return self.w * observation

    def choose(self, inputs: ModelInputs, state: Any, mode: Mode) -> Acted:
        return Acted(self(inputs.observation), {}, state)

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        return {}


class LinearCritic(nn.Module):
    """Says u s + v a."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.u * observation + self.v * action


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Settings of the toy."""

    momentum: float = 0.0
    """Of both optimisers."""


class Toy(Algorithm[Transitions]):
    """A deterministic policy gradient with a target critic."""

    Config = ToyConfig
    actor_type = LinearActor
    takes = Transitions
    mode = "explore"
    reduction = "mean"
    separable = True
    minimised_by: ClassVar = {"critic_loss": "critic", "actor_loss": "actor"}

    def __init__(self, actor: Actor, config: ToyConfig) -> None:
        super().__init__(actor, config)
        self.critic = LinearCritic()
        self.target = copy.deepcopy(self.critic)
        self.models |= {"critic": self.critic, "target": self.target}
        self.optimisers = {
            "actor": torch.optim.SGD(actor.parameters(), ACTOR_RATE, config.momentum),
            "critic": torch.optim.SGD(self.critic.parameters(), CRITIC_RATE, config.momentum),
        }

    def losses(self, minibatch: Transitions) -> Losses:
        seen, following = minibatch.observation, minibatch.next_observation
        with torch.no_grad():
            after = self.target(following, self.actor(following))
        targets = minibatch.reward + DISCOUNT * (1.0 - minibatch.terminated.float()) * after
        values = self.critic(seen, minibatch.action)
        terms = {
            "actor_loss": -self.critic(seen, self.actor(seen)).mean(),
            "critic_loss": 0.5 * (values - targets).square().mean(),
        }
        return Losses(terms, {"value": values.mean()})

    def after_step(self) -> None:
        assert not torch.is_grad_enabled()
        for old, new in zip(self.target.parameters(), self.critic.parameters(), strict=True):
            old.lerp_(new, TAU)


def two_transitions(env_steps: int = 1) -> Transitions:
    return Transitions(
        observation=torch.tensor([1.0, 2.0]),
        action=torch.tensor([1.0, -1.0]),
        reward=torch.tensor([0.5, 1.0]),
        terminated=torch.tensor([False, True]),
        next_observation=torch.tensor([2.0, 1.0]),
        env_steps=env_steps,
    )


def random_transitions(count: int = 6) -> Transitions:
    return two_transitions().map(lambda leaf: torch.randn(count).to(leaf.dtype))
