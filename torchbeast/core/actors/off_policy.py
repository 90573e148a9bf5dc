# SPDX-License-Identifier: Apache-2.0
"""Actors of off-policy algorithms: they see the observation alone, and keep no memory.

Transitions of a replay hold single observations, so nothing else would be known while learning: no
reward, last action or recurrent state. Where one observation does not determine the state, frames
can be stacked.

    mode explore   with probability epsilon a uniformly random action, else as the actor explores
    mode sample    from the policy that is learnt
    mode greedy    the action that this policy rates highest

N is a number of observations.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Acted, Actor, Mode, ModelInputs
from torchbeast.core.actors.masks import ActionMask
from torchbeast.core.distributions import Categorical, SquashedGaussian
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import Nest, map_leaves


class Chosen(NamedTuple):
    """The results of choosing, [N, ...]."""

    action: Tensor
    extras: dict[str, Tensor]


class OffPolicyActor(Actor):
    """The common base; a subclass defines forward(observation) and choose_each.

    epsilon: float32 [], the probability of a random action in mode explore, at first 1. As a buffer
        it is published and saved with the weights; the algorithm changes it in place.
    action_mask: how observations mask the actions of a Discrete space, None where they do not; set
        by make_model. Calling the actor, as acting and learning do, rules out masked actions:
        forward need not know of masks.
    """

    epsilon: Tensor
    action_mask: ActionMask | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.ones(()))

    def __call__(self, observation: Nest[Tensor]) -> Tensor:
        """Returns the outputs of forward, with -inf for masked actions."""
        outputs: Tensor = super().__call__(observation)
        mask = self.action_mask
        return outputs if mask is None else mask.masked(outputs, observation)

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        """Returns what the action is chosen by, [N, ...], of observations [N, *shape]."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward(observation)")

    @abstractmethod
    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Chooses actions by outputs of forward."""

    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Chooses an action for each environment of a row [1, B, ...].

        Raises RunError where a mask rules out all actions.
        """
        if self.action_mask is not None:
            self.action_mask.check(inputs.observation)
        observation: Nest[Tensor] = map_leaves(lambda leaf: leaf.squeeze(0), inputs.observation)
        action, extras = self.choose_each(self(observation), mode)
        rows = {name: extra.unsqueeze(0) for name, extra in extras.items()}
        return Acted(action.unsqueeze(0), rows, state)

    def randomly(self, action: Tensor, others: Tensor) -> Tensor:
        """Returns actions [N, ...] of which each is replaced by that of others with probability
        epsilon.
        """
        is_random = torch.rand(len(action), device=action.device) < self.epsilon
        return torch.where(is_random.view(-1, *[1] * (action.dim() - 1)), others, action)


class ActorWithCritics(OffPolicyActor):
    """A policy that makes the critics which it is learnt from. Gives no extras.

    The critics are a model of the algorithm: they do not act, and are not published.
    """

    @abstractmethod
    def make_critics(self) -> Critics:
        """Returns new critics of the same observations and actions."""

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """None: transitions need none."""
        return {}


class StochasticActorCritic(ActorWithCritics):
    """A policy for SAC: forward gives the params [N, num_params] of a squashed Gaussian over a Box
    or of a categorical over a Discrete, -inf for illegal actions.
    """

    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Samples the policy, or takes its mode."""
        actions = self.distribution
        action = actions.mode(outputs) if mode == "greedy" else actions.sample(outputs)
        assert isinstance(action, Tensor)
        if mode == "explore":
            action = self.randomly(action, self._uniform(outputs))
        return Chosen(action, {})

    def _uniform(self, outputs: Tensor) -> Tensor:
        if isinstance(self.distribution, SquashedGaussian):
            return uniform_in(self.distribution, outputs[..., : self.distribution.num_features])
        assert isinstance(self.distribution, Categorical)
        return uniform_among(self.distribution, outputs)


class DeterministicActorCritic(ActorWithCritics):
    """A policy for TD3: forward gives u [N, n], whose tanh is the action in units of the Box.

    noise: float32 [], deviation of what is added to actions in mode explore, in units of the Box.
    """

    distribution: SquashedGaussian
    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(()))

    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Takes the action of the policy, in mode explore with noise."""
        units = outputs.tanh()
        if mode != "explore":
            return Chosen(self.distribution.in_box(units), {})
        noisy = self.distribution.in_box(units + self.noise * torch.randn_like(units))
        return Chosen(self.randomly(noisy, uniform_in(self.distribution, units)), {})


class Critics(nn.Module):
    """Two critics, whose smaller value keeps both from rating too high (Fujimoto et al. 2018,
    arXiv 1802.09477, section 4.2).
    """

    def forward(self, observation: Nest[Tensor], action: Tensor | None = None) -> Tensor:
        """Returns values [2, N] of actions [N, ...]; without them, [2, N, n] of every action of a
        Discrete space.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts observations in running statistics, as Actor.observe."""


def uniform_in(distribution: SquashedGaussian, units: Tensor) -> Tensor:
    """Returns uniformly random actions of a Box, as many as there are rows of units [N, n]."""
    return distribution.in_box(2.0 * torch.rand_like(units) - 1.0)


def uniform_among(distribution: Categorical, outputs: Tensor) -> Tensor:
    """Returns uniformly random actions [N] of those whose outputs [N, n] are not -inf."""
    legal = torch.zeros_like(outputs).masked_fill(outputs.isneginf(), -torch.inf)
    return distribution.sample(legal)
