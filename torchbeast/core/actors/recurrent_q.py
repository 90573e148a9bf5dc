# SPDX-License-Identifier: Apache-2.0
"""Recurrent Q-networks, for R2D2: the actor-critics with a core, read as dueling networks (Wang et
al. 2016, arXiv 1511.06581).

    Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)                                   their equation 9

V is what the actor-critic's baseline says, A its policy's params. Like them they see the reward and
the last action. The replay stores the recurrent state of every row, as an extra of acting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Acted, ActorCritic, Mode, ModelInputs, ModelOutput
from torchbeast.core.actors.networks import BUILT_IN, BuiltInNet
from torchbeast.core.actors.off_policy import Exploring
from torchbeast.core.base.nest import Nest, flatten, pack_as
from torchbeast.core.base.specs import SpecError
from torchbeast.core.envs.spaces import ArraySpec

CORE_STATE = "core_state"


class RecurrentQNetwork(Exploring, ActorCritic):
    """Estimates the values of the actions of a Discrete space, from what it remembers.

    Subclasses define forward: its policy_logits are the values of actions, its baseline the largest
    one. The extra core_state is the recurrent state after the row, which the next row begins with.
    """

    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Chooses the best action; exploring, with probability epsilon a random legal one."""
        values, _, state = self(inputs, state)
        action = self.best(values[0], mode).unsqueeze(0)
        return Acted(action, {CORE_STATE: joined_state(state).unsqueeze(0)}, state)

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """The extra core_state [n], all numbers of the recurrent state."""
        return {CORE_STATE: ArraySpec((joined_state(self.initial_state(1)).shape[1],), "float32")}

    def state_of(self, joined: Tensor) -> Nest[Tensor]:
        """Returns leaves [layers, B, hidden] of an extra core_state [B, n]."""
        usual = self.initial_state(len(joined))
        leaves = flatten(usual)
        parts = torch.split(joined, [leaf[:, 0].numel() for leaf in leaves], -1)
        shaped = (
            part.reshape(len(joined), *leaf[:, 0].shape).transpose(0, 1).contiguous()
            for part, leaf in zip(parts, leaves, strict=True)
        )
        state: Nest[Tensor] = pack_as(usual, [*shaped])
        return state


def joined_state(state: Nest[Tensor]) -> Tensor:
    """Returns leaves [layers, B, hidden] as one tensor [B, n]; raises SpecError without leaves."""
    if not (leaves := flatten(state)):
        raise SpecError("r2d2 needs a network with memory: set use_lstm, or use algo dqn")
    return torch.cat([leaf.transpose(0, 1).flatten(1) for leaf in leaves], -1)


class Dueling(RecurrentQNetwork, BuiltInNet):
    """The first base class of a built-in network, whose outputs it reads as V and A."""

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        advantages, baseline, core_state = super().forward(inputs, core_state)
        values = advantages - advantages.mean(-1, keepdim=True) + baseline.unsqueeze(-1)
        return ModelOutput(values, values.amax(-1), core_state)


def _dueling(net: type[BuiltInNet]) -> Callable[..., ActorCritic]:
    shown = {"__module__": __name__, "__signature__": inspect.signature(net)}
    return type(f"Dueling{net.__name__}", (Dueling, net), shown)


NETWORKS = {f"r2d2-{name}": _dueling(net) for name, net in BUILT_IN.items()}
