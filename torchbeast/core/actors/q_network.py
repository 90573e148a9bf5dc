# SPDX-License-Identifier: Apache-2.0
"""Q-networks: they estimate the value of every action and act epsilon-greedily.

    mode explore   with probability epsilon a uniformly random legal action, else the best one
    mode sample    the best action: the policy that Q-learning learns is deterministic
    mode greedy    the best action

An action whose value is -inf is illegal and is never taken.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Acted, Actor, Mode, ModelInputs
from torchbeast.core.actors.networks import TorsoNetwork, torsos_from
from torchbeast.core.actors.recurrent import make_lstm
from torchbeast.core.actors.torsos import SHALLOW_MINIMUM, ShallowTorso
from torchbeast.core.distributions import Categorical
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, ObservationSpace
from torchbeast.core.nest_py import Nest

_LSTM_SIZE = 256


class QOutput(NamedTuple):
    """The outputs of a Q-network, [T, B, ...]."""

    q_values: Tensor  # float32 [T, B, n], one for each action; -inf: illegal
    core_state: Nest[Tensor]  # leaves [layers, B, hidden], to be given with the next row


class QNetwork(Actor):
    """Estimates the values of the actions of a Discrete space; its extra is q_values.

    epsilon: float32 [], the probability of a random action in mode explore, at first 1. As a buffer
        it is published and saved with the weights; the algorithm changes it in place.
    """

    epsilon: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> QOutput:
        """Returns the values of all actions, and the state after the last row."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define forward(inputs, core_state)"
        )

    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Chooses the best action; in mode explore, with probability epsilon a random legal one."""
        q_values, state = self(inputs, state)
        actions = self._actions
        action = actions.mode(q_values)
        if mode == "explore":
            legal = torch.zeros_like(q_values).masked_fill(q_values.isneginf(), -math.inf)
            is_random = torch.rand_like(q_values[..., 0]) < self.epsilon
            action = torch.where(is_random, actions.sample(legal), action)
        return Acted(action, {"q_values": q_values}, state)

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """The extra q_values [n]; raises ValueError unless the action space is Discrete."""
        return {"q_values": ArraySpec((self._actions.num_params,), "float32")}

    @property
    def _actions(self) -> Categorical:
        if not isinstance(self.distribution, Categorical):
            kind = type(self.distribution).__name__
            raise ValueError(
                f"{type(self).__name__} needs a Discrete action space, but this one has a {kind} "
                "distribution: use an actor-critic"
            )
        return self.distribution


class QNet(TorsoNetwork, QNetwork):
    """The shallow network with a head of action values; optional LSTM, one layer of 256 units."""

    def __init__(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        use_lstm: bool,
        hidden: int = 512,
    ) -> None:
        torsos = torsos_from(observation_space, ShallowTorso, SHALLOW_MINIMUM)
        super().__init__(torsos, action_space, fc_size=hidden, sees_last_action=True)
        size = self._add_core(make_lstm(self._core_input_size, _LSTM_SIZE) if use_lstm else None)
        self.q_values = nn.Linear(size, self.distribution.num_params)

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> QOutput:
        features, core_state = self._run(inputs, core_state)
        return QOutput(self.q_values(features), core_state)
