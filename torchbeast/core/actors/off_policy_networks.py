# SPDX-License-Identifier: Apache-2.0
"""The built-in networks of off-policy algorithms: Q-networks for DQN, policies with critics for SAC
and TD3, each over the torsos of the networks in networks.py.

    leaf -> torso ┐
    leaf -> torso ┼-> [features, action of a critic] -> fc, ReLU, as many as `layers` -> head
    ...           ┘

Numbers go straight into the first layer, so that vectors have the networks of the papers: two
layers of 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.leaves import torso_for
from torchbeast.core.actors.networks import OverImages, check_hidden
from torchbeast.core.actors.off_policy import (
    Critics,
    DeterministicActorCritic,
    OffPolicyActor,
    StochasticActorCritic,
)
from torchbeast.core.actors.q_network import QNetwork
from torchbeast.core.actors.torsos import (
    SHALLOW_MINIMUM,
    SMALL_MINIMUM,
    DeepTorso,
    FixupTorso,
    FlatTorso,
    NormedShallowTorso,
    ShallowTorso,
    SmallTorso,
)
from torchbeast.core.distributions import SquashedGaussian, distribution_for
from torchbeast.core.envs.spaces import ActionSpace, Box, Discrete, ObservationSpace
from torchbeast.core.nest_py import Nest, flatten
from torchbeast.core.precision import computing_in
from torchbeast.core.specs import SpecError


class Body(NamedTuple):
    """The shape of a network between the observation and its head."""

    over_images: OverImages  # makes the torsos of images
    smallest: int  # pixels a side of these
    hidden: int  # units in a layer
    layers: int  # after the torsos


BODIES = {
    "mlp": Body(None, 1, hidden=256, layers=2),
    "small": Body(SmallTorso, SMALL_MINIMUM, hidden=128, layers=1),
    "shallow": Body(ShallowTorso, SHALLOW_MINIMUM, hidden=512, layers=1),
    "shallow-norm": Body(NormedShallowTorso, SHALLOW_MINIMUM, hidden=512, layers=1),
    "deep": Body(DeepTorso, 1, hidden=256, layers=1),
    "fixup": Body(FixupTorso, 1, hidden=256, layers=1),
}


class Features(nn.Module):
    """Torsos and hidden layers over one observation space.

    num_features: size of the output. compute_dtype: of the torsos.
    """

    def __init__(self, space: ObservationSpace, body: Body, num_more: int = 0) -> None:
        """num_more: number of further inputs of the first layer."""
        super().__init__()
        check_hidden(body.hidden)
        make = (body.over_images, body.smallest, FlatTorso)
        self.torsos = nn.ModuleList(torso_for(leaf, *make) for leaf in flatten(space))
        seen = sum(torso.num_features for torso in self.torsos)  # type: ignore[misc]
        sizes = [seen + num_more, *[body.hidden] * body.layers]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.num_features = body.hidden

    def forward(
        self, observation: Nest[Tensor], dtype: torch.dtype, more: Sequence[Tensor] = ()
    ) -> Tensor:
        """Returns features float32 [N, num_features] of leaves [N, *shape] and more [N, ...].

        dtype: what the torsos compute in.
        """
        leaves = flatten(observation)
        with computing_in(dtype, leaves[0].device):
            seen = [torso(leaf) for torso, leaf in zip(self.torsos, leaves, strict=True)]
        features = torch.cat([*(part.float() for part in seen), *more], -1)
        for layer in self.layers:
            features = F.relu(layer(features))
        return features

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts leaves [T, B, *shape] in the torsos' running statistics."""
        for torso, leaf in zip(self.torsos, flatten(observation), strict=True):
            torso.observe(leaf.flatten(0, 1))  # type: ignore[operator]


class QNet(QNetwork):
    """A Q-network: features, and a head of action values."""

    separable = True

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, body: Body
    ) -> None:
        super().__init__()
        self.distribution = distribution_for(action_space)
        self.features = Features(observation_space, body)
        self.q_values = nn.Linear(self.features.num_features, self._actions.num_params)

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        values: Tensor = self.q_values(self.features(observation, self.compute_dtype))
        return values

    def feature_weights(self) -> Iterable[nn.Parameter]:
        return self.features.torsos.parameters()

    def observe(self, observation: Nest[Tensor]) -> None:
        self.features.observe(observation)


class TwinCritics(Critics):
    """Two networks: of observation and action in a Box, or with a head of all actions."""

    def __init__(self, space: ObservationSpace, body: Body, num_inputs: int, num_values: int):
        """num_inputs: features of an action, 0 without it as an input. num_values: of a head."""
        super().__init__()
        self.features = nn.ModuleList(Features(space, body, num_inputs) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(body.hidden, num_values) for _ in range(2))

    def forward(self, observation: Nest[Tensor], action: Tensor | None = None) -> Tensor:
        """action: float32 [N, num_inputs] in units of the Box; None for a Discrete."""
        more = [] if action is None else [action]
        pairs = zip(self.features, self.heads, strict=True)
        values = [head(features(observation, torch.float32, more)) for features, head in pairs]
        stacked = torch.stack(values)
        return stacked if action is None else stacked.squeeze(-1)

    def observe(self, observation: Nest[Tensor]) -> None:
        for features in self.features:
            features.observe(observation)  # type: ignore[operator]


class SACNet(StochasticActorCritic):
    """A policy with a squashed Gaussian over a Box, or a categorical over a Discrete."""

    separable = True

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, body: Body
    ) -> None:
        super().__init__()
        if not isinstance(action_space, Box | Discrete):
            raise SpecError(
                f"SAC needs a Box or Discrete action space, got {_kind(action_space)}: use impala "
                "or ppo"
            )
        self.distribution = distribution_for(action_space, over_box=SquashedGaussian)
        self.features = Features(observation_space, body)
        self.policy = nn.Linear(body.hidden, self.distribution.num_params)
        self._space, self._body = observation_space, body

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        params: Tensor = self.policy(self.features(observation, self.compute_dtype))
        return params

    def make_critics(self) -> TwinCritics:
        if isinstance(self.distribution, SquashedGaussian):
            return TwinCritics(self._space, self._body, self.distribution.num_features, 1)
        return TwinCritics(self._space, self._body, 0, self.distribution.num_params)

    def feature_weights(self) -> Iterable[nn.Parameter]:
        return self.features.torsos.parameters()

    def observe(self, observation: Nest[Tensor]) -> None:
        self.features.observe(observation)


class TD3Net(DeterministicActorCritic):
    """A deterministic policy over a Box."""

    separable = True

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, body: Body
    ) -> None:
        super().__init__()
        if not isinstance(action_space, Box):
            raise SpecError(
                f"TD3 needs a Box action space, got {_kind(action_space)}: use dqn or sac"
            )
        self.distribution = SquashedGaussian(action_space)
        self.features = Features(observation_space, body)
        self.policy = nn.Linear(body.hidden, self.distribution.num_features)
        self._space, self._body = observation_space, body

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        u: Tensor = self.policy(self.features(observation, self.compute_dtype))
        return u

    def make_critics(self) -> TwinCritics:
        return TwinCritics(self._space, self._body, self.distribution.num_features, 1)

    def feature_weights(self) -> Iterable[nn.Parameter]:
        return self.features.torsos.parameters()

    def observe(self, observation: Nest[Tensor]) -> None:
        self.features.observe(observation)


FAMILIES: dict[str, Callable[..., OffPolicyActor]] = {"q": QNet, "sac": SACNet, "td3": TD3Net}


def _made(
    family: str,
    body: str,
    observation_space: ObservationSpace,
    action_space: ActionSpace,
    use_lstm: bool,
    hidden: int | None = None,
) -> OffPolicyActor:
    """Makes a network; hidden: units in a layer, None for the body's own."""
    if use_lstm:
        raise SpecError(
            "off-policy algorithms learn from single steps, which have no recurrent state: leave "
            "out --use_lstm, or use impala or ppo"
        )
    shape = BODIES[body]
    shape = shape if hidden is None else shape._replace(hidden=hidden)
    return FAMILIES[family](observation_space, action_space, shape)


NETWORKS: Mapping[str, Callable[..., OffPolicyActor]] = {
    f"{family}-{body}": partial(_made, family, body) for family in FAMILIES for body in BODIES
}


def _kind(space: ActionSpace) -> str:
    return type(space).__name__
