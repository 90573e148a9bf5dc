# SPDX-License-Identifier: Apache-2.0
"""The built-in networks: deep (IMPALA's ResNet), fixup, shallow (AtariNet), small, mlp.

    leaf -> torso ┐
    leaf -> torso ┼-> fc, ReLU -> [features, reward, last action] -> (LSTM) -> policy
    ...           ┘                                                        └-> baseline

The mlp has tanh in place of ReLU. The core is an LSTM, or as the keyword argument `core` says; see
cores.py.
With a single leaf the torso's layers belong to the network itself and are named as in the original
programs, so that published checkpoints load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors import torsos
from torchbeast.core.actors.contract import Actor, ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.cores import Core, initial_core_state, make_core, run_core
from torchbeast.core.actors.distributions import ActionDistribution, distribution_for
from torchbeast.core.actors.encoders import VECTOR_SIZE, torso_for
from torchbeast.core.base.computing import computing_in
from torchbeast.core.base.nest import Nest, flatten
from torchbeast.core.base.specs import SpecError, check_count, check_kwarg
from torchbeast.core.envs.spaces import ActionSpace, ObservationSpace

RELU_GAIN = math.sqrt(2.0)  # makes up for ReLU, which halves the mean square
POLICY_GAIN = 0.01  # makes all actions about equally likely
BASELINE_GAIN = 1.0


def orthogonal_(layers: Iterable[nn.Conv2d | nn.Linear], gain: float = RELU_GAIN) -> None:
    """Initialises layers in place: orthogonal weights (Saxe et al. 2014, arXiv 1312.6120) scaled by
    `gain`, biases 0.

    The frames of a game are nearly constant: a ball is a few pixels of 7,000. With PyTorch's
    default initialisation every layer's output is smaller than its input, so that after four layers
    almost nothing is left of the ball, while the constant background pushes all units in the same
    direction, until none responds.

    Rows, or columns where those are fewer, are orthogonal and of length `gain`; a convolution's
    filter is a row.
    """
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


ONE_HOT_ACTIONS = 64  # features of an action that enter the core as they are
ACTION_SIZE = 32  # features of an action that has more of them


class LastAction(nn.Module):
    """The last action as an input of the core: its features, or an embedding if there are many.

    The embedding keeps the core's size independent of the number of actions. It is the sum of a row
    of the table for each choice, and of one row for each entry of a Box, times the entry.
    """

    def __init__(self, actions: ActionDistribution) -> None:
        super().__init__()
        self._actions = actions
        self.num_features = actions.num_features
        self.register_parameter("table", None)
        if actions.num_features > ONE_HOT_ACTIONS:
            self.num_features = ACTION_SIZE
            rows = torch.randn(actions.num_features, ACTION_SIZE)
            self.table = nn.Parameter(rows / math.sqrt(ACTION_SIZE))  # about as long as a one-hot

    def forward(self, action: Nest[Tensor]) -> Tensor:
        """Returns float32 [..., num_features] of actions [..., *shape]."""
        features = self._actions.features(action)
        return features if self.table is None else features @ self.table


def pair_of(state: Nest[Tensor]) -> tuple[Nest[Tensor], Nest[Tensor]]:
    """Returns the recurrent states of two bodies, () and () of feed-forward ones."""
    first, second = state or ((), ())
    return first, second  # type: ignore[return-value]


class FreeDeviations(nn.Linear):
    """The last layer of a policy whose deviations do not depend on the observation: of their params
    only the biases count, as in Schulman et al. 2017.
    """

    depends: Tensor

    def __init__(self, size: int, actions: ActionDistribution) -> None:
        super().__init__(size, actions.num_params)
        depends = 1.0 - torch.tensor(actions.deviations, dtype=torch.float32)
        self.register_buffer("depends", depends.unsqueeze(1), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight * self.depends, self.bias)


class BuiltInNet(ActorCritic):
    """Common base of the networks that have names. Each declares what differs."""

    core: Core | None
    value_body: BuiltInNet | None  # with torsos and a core of its own; None: shared
    separable = True
    recordable = True

    over_images: ClassVar[type[torsos.ImageTorso] | None]  # makes the torsos of images
    width: ClassVar[int]  # of the joint layer, and of the core
    with_last_action: ClassVar[bool] = True
    is_orthogonal: ClassVar[bool] = False
    usual_activation: ClassVar[str] = "relu"

    def __init__(
        self,
        observation_space: ObservationSpace,
        action_space: ActionSpace,
        use_lstm: bool,
        hidden: int | None = None,
        core: str = "lstm",
        core_layers: int | None = None,
        core_length: int | None = None,
        norm: bool = False,
        shared_body: bool | None = True,
        orthogonal: bool | None = None,
        state_deviation: bool = True,
        initial_deviation: float | None = None,
        activation: str | None = None,
    ) -> None:
        """Makes the network.

        hidden: None for the network's own width. core: lstm, gru or gtrxl. core_layers: None for
        the network's own number of layers. core_length: rows in the memory of a gtrxl; None: 64.
        norm: whether the joint layer has LayerNorm (Ba et al. 2016) before its activation.
        shared_body: whether policy and value share all layers below their heads; None: unless it is
        an mlp without a core. orthogonal: whether layers, but no core's and no Fixup block's, are
        initialised orthogonally, with a policy close to uniform; None: the network's own way.
        state_deviation: whether the deviation of a Gaussian policy depends on the observation.
        initial_deviation: of an untrained Gaussian policy, in units of half the box; None: about 1.
        activation: relu or tanh, of the joint layer and of the torsos of numbers; None: the
        network's own.
        """
        super().__init__()
        name = self.usual_activation if activation is None else activation
        check_kwarg(name in _ACTIVATIONS, "activation", "relu or tanh", name)
        self._activation = _ACTIVATIONS[name]
        over_numbers = partial(torsos.VectorTorso, size=VECTOR_SIZE, activation=self._activation)
        leaves = flatten(observation_space)
        bodies = [torso_for(leaf, self.over_images, over_numbers) for leaf in leaves]
        width = self.width if hidden is None else hidden
        check_count("hidden", width)
        self.distribution = distribution_for(action_space)
        if len(bodies) == 1:  # its layers become this module's own
            for child, layer in bodies[0].named_children():
                self.add_module(child, layer)
        else:
            self.torsos = nn.ModuleList(bodies)
        self.leaf_torsos = tuple(bodies)
        self.fc = nn.Linear(sum(torso.num_features for torso in bodies), width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.last_action = LastAction(self.distribution) if self.with_last_action else None
        last_action = 0 if self.last_action is None else self.last_action.num_features
        self._core_input_size = width + 1 + last_action
        if not use_lstm and (core != "lstm" or core_layers is not None):
            raise SpecError(
                "the model's keyword arguments core and core_layers describe a recurrent layer, "
                "but the model has none: add use_lstm, or remove them"
            )
        if core_length is not None:
            check_kwarg(
                core == "gtrxl", "core_length", "left out unless core is gtrxl", core_length
            )
            check_count("core_length", core_length)
        if core_layers is not None:
            check_count("core_layers", core_layers)
        self.core = self._make_core(core, core_layers, core_length or 64) if use_lstm else None
        # The last layers come in the original's order, which saved optimiser states rely on.
        size = self._core_input_size if self.core is None else self.core.hidden_size
        self.policy = nn.Linear(size, self.distribution.num_params)
        self.baseline = nn.Linear(size, 1)
        if not state_deviation and any(self.distribution.deviations):
            self.policy = FreeDeviations(self.policy.in_features, self.distribution)
        self._initialise(
            self.is_orthogonal if orthogonal is None else orthogonal, initial_deviation
        )
        self.value_body = None
        if shared_body is None:
            shared_body = self.over_images is not None or use_lstm
        if not shared_body:
            shape = use_lstm, hidden, core, core_layers, core_length, norm
            ways: dict[str, Any] = {"orthogonal": orthogonal, "activation": activation}
            self.value_body = type(self)(observation_space, action_space, *shape, **ways)
            del self.baseline, self.value_body.policy

    def _make_core(self, kind: str, num_layers: int | None, length: int) -> Core:
        size, width = self._core_input_size, self.fc.out_features
        return make_core(kind, size, width, num_layers or 1, length)

    def _initialise(self, orthogonal: bool, deviation: float | None) -> None:
        if orthogonal:
            others = set() if self.core is None else set(self.core.modules())
            for block in self.modules():
                others.update(block.modules() if isinstance(block, torsos.FixupBlock) else ())
            layers = (layer for layer in self.modules() if layer not in others)
            orthogonal_(layer for layer in layers if isinstance(layer, nn.Conv2d | nn.Linear))
            orthogonal_([self.policy], POLICY_GAIN)
            orthogonal_([self.baseline], BASELINE_GAIN)
        if deviation is not None:
            holds = isinstance(deviation, int | float) and deviation > 0
            check_kwarg(holds, "initial_deviation", "a number above 0", deviation)
            with torch.no_grad():
                self.policy.bias[self.distribution.deviations] = math.log(deviation)

    def feature_weights(self) -> Iterable[nn.Parameter]:
        bodies = (self,) if self.value_body is None else (self, self.value_body)
        layers = [layer for body in bodies for layer in (*body.leaf_torsos, body.fc)]
        return nn.ModuleList(layers).parameters()

    def initial_state(self, batch_size: int) -> Nest[Tensor]:
        if self.core is None:
            return ()
        own = initial_core_state(self.core, batch_size)
        other = self.value_body
        return own if other is None else (own, other.initial_state(batch_size))

    def _run(
        self, inputs: ModelInputs, state: Nest[Tensor], owner: Actor
    ) -> tuple[Tensor, Nest[Tensor]]:
        """Returns what the heads see, [T, B, num_features], and the state after the last row.

        owner: the network that a program set up, whose precision and form of rewards count.
        """
        steps, batch = inputs.reward.shape
        leaves = [leaf.flatten(0, 1) for leaf in flatten(inputs.observation)]
        with computing_in(owner.compute_dtype, inputs.reward.device):
            seen = [torso(leaf) for torso, leaf in zip(self.leaf_torsos, leaves, strict=True)]
            joint = self.fc(seen[0] if len(seen) == 1 else torch.cat(seen, -1))
            joint = self._activation(self.norm(joint))
        parts = [
            joint.float().view(steps, batch, -1),
            owner.transform_reward(inputs.reward).unsqueeze(-1),
        ]
        if self.last_action is not None:
            parts.append(self.last_action(inputs.last_action))
        features = torch.cat(parts, -1)
        if self.core is None:
            return features, state
        return run_core(self.core, features, inputs.done.bool(), state)

    def observe(self, observation: Nest[Tensor]) -> None:
        for torso, leaf in zip(self.leaf_torsos, flatten(observation), strict=True):
            torso.observe(leaf.flatten(0, 1))
        if self.value_body is not None:
            self.value_body.observe(observation)

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        other = self.value_body
        if other is None:
            features, core_state = self._run(inputs, core_state, self)
            return ModelOutput(self.policy(features), self._value(features), core_state)
        own, of_value = pair_of(core_state)
        features, own = self._run(inputs, own, self)
        seen, of_value = other._run(inputs, of_value, self)
        after = () if self.core is None else (own, of_value)
        return ModelOutput(self.policy(features), other._value(seen), after)

    def _value(self, features: Tensor) -> Tensor:
        values: Tensor = self.baseline(features)
        return values.squeeze(-1) if self.baseline.out_features == 1 else values


class DeepNet(BuiltInNet):
    """IMPALA's ResNet, with an optional LSTM of 256 units, one layer."""

    over_images: ClassVar[type[torsos.ImageTorso] | None] = torsos.DeepTorso
    width = 256
    with_last_action = False


class FixupNet(DeepNet):
    """DeepNet with Fixup's residual blocks."""

    over_images = torsos.FixupTorso


class AtariNet(BuiltInNet):
    """The original TorchBeast's network for Atari: three convolutions and an optional LSTM.

    The LSTM has two layers, as wide as its input. Every layer has PyTorch's default initialisation.
    The computation must not change, so that the original's checkpoints can be evaluated.
    """

    over_images = torsos.ShallowTorso
    width = 512
    usual_lstm: ClassVar[bool] = True  # PyTorch's initialisation, see make_core

    def _make_core(self, kind: str, num_layers: int | None, length: int) -> Core:
        if kind == "gtrxl":
            return super()._make_core(kind, num_layers, length)
        size = self._core_input_size
        return make_core(kind, size, size, num_layers or 2, length, self.usual_lstm)


class NormedAtariNet(AtariNet):
    """AtariNet with standardised images, orthogonally initialised: learns Pong in fewer steps."""

    over_images = torsos.NormedShallowTorso
    usual_lstm = False
    is_orthogonal = True


class SmallNet(BuiltInNet):
    """One convolution and a layer of 128, with an optional LSTM of 128 units, one layer."""

    over_images = torsos.SmallTorso
    width = VECTOR_SIZE


class MLPNet(BuiltInNet):
    """Two layers of 128 over flattened leaves, with an optional LSTM of 128 units, one layer.

    Its activation is tanh, which bounds what a new observation can change. With ReLU and running
    statistics, which a new observation can exceed tenfold, IMPALA did not find Acrobot's goal in
    500,000 steps. (Andrychowicz et al. 2021, arXiv 2006.05990, found tanh best in five other
    tasks.)
    """

    over_images = None
    width = VECTOR_SIZE
    usual_activation = "tanh"


BUILT_IN: dict[str, type[BuiltInNet]] = {
    "deep": DeepNet,
    "fixup": FixupNet,
    "shallow": AtariNet,
    "shallow-norm": NormedAtariNet,
    "small": SmallNet,
    "mlp": MLPNet,
}


_ACTIVATIONS: dict[str, torsos.Activation] = {"relu": torch.relu, "tanh": torch.tanh}
