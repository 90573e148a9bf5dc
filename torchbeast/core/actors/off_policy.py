# SPDX-License-Identifier: Apache-2.0
"""Networks of DQN, PQN and R2D2 (Q-networks), and of SAC and TD3 (policies with critics).

Most see the observation alone and keep no memory. Transitions of a replay hold single observations,
so nothing else would be known while learning: no reward, last action or recurrent state. Where one
observation does not determine the state, frames can be stacked.

    leaf -> torso ┐
    leaf -> torso ┼-> [features, action of a critic] -> fc, ReLU, as many as `layers` -> head
    ...           ┘

Numbers enter the first layer directly, so that vectors have the networks of the papers: two layers
of 256. The modes of acting:

    explore   with probability epsilon a uniformly random legal action, else as the actor explores
    ladder    the same, with another epsilon in each environment; of Q-networks
    sample    from the learnt policy; a Q-network's policy takes the best action
    greedy    the action that this policy rates highest

An action whose value is -inf is illegal and is never taken. N is a number of observations.

R2D2's networks are recurrent. They are the actor-critics with a core, read as dueling networks
(Wang et al. 2016, arXiv 1511.06581):

    Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)                                   their equation 9

V is what the actor-critic's baseline says, A its policy's params. Like them they see the reward and
the last action. The replay stores the recurrent state of every row, as an extra of acting.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.contract import (
    Acted,
    ActionMask,
    Actor,
    ActorCritic,
    Mode,
    ModelInputs,
    ModelOutput,
)
from torchbeast.core.actors.distributions import (
    ActionDistribution,
    Categorical,
    SquashedGaussian,
    distribution_for,
)
from torchbeast.core.actors.encoders import torso_for
from torchbeast.core.actors.networks import BUILT_IN, BuiltInNet
from torchbeast.core.actors.torsos import FlatTorso, ImageTorso
from torchbeast.core.base.computing import computing_in
from torchbeast.core.base.nest import Nest, flatten, map_leaves, pack_as
from torchbeast.core.base.specs import SpecError, check_count
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, Box, ObservationSpace
from torchbeast.core.envs.tasks import without_task

_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0


class Chosen(NamedTuple):
    """The results of choosing, [N, ...]."""

    action: Tensor
    extras: dict[str, Tensor]


class Exploring(Actor):
    """Base class of networks that take random actions in mode explore.

    Attributes:
        epsilon: float32 [], the probability of a random action in mode explore, initially 1. As a
            buffer it is published and saved with the weights; the algorithm changes it in place.
    """

    epsilon: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Passes the arguments on to the next base class."""
        super().__init__(*args, **kwargs)
        self.register_buffer("epsilon", torch.ones(()))

    def ladder(self) -> Tensor:
        """Returns the probability of a random action in each environment [N].

            epsilon_i = epsilon^(1 + 7 u_i),   u_i = 0.618... i modulo 1

        Ape-X (Horgan et al. 2018, arXiv 1803.00933) has u_i = i / (N - 1). Multiples of the golden
        ratio are spread as evenly for any N, because environments may join and leave.
        """
        if self.env_index is None:  # the actor was not told
            return self.epsilon
        places = self.env_index.double() * _GOLDEN_RATIO % 1.0
        return self.epsilon ** (1.0 + 7.0 * places).to(self.epsilon)

    def best(self, values: Tensor, mode: Mode) -> Tensor:
        """Returns the best actions [N] by their values [N, n]; exploring, some random legal ones.

        Raises SpecError unless the action space is Discrete.
        """
        actions = discrete(self)
        action = actions.mode(values)
        if mode not in ("explore", "ladder"):
            return action
        return self.randomly(action, uniform_among(actions, values), mode)

    def randomly(self, action: Tensor, others: Tensor, mode: Mode = "explore") -> Tensor:
        """Replaces each action by another with probability epsilon.

        Args:
            action: [N, ...].
            others: [N, ...], the actions that may take their place.
            mode: "ladder" for another epsilon in each environment.
        """
        epsilon = self.ladder() if mode == "ladder" else self.epsilon
        is_random = torch.rand(len(action), device=action.device) < epsilon
        return torch.where(is_random.view(-1, *[1] * (action.dim() - 1)), others, action)


class OffPolicyActor(Exploring):
    """Base class of the networks of DQN, PQN, SAC and TD3; subclasses define `forward` and
    `choose_each`.

    Attributes:
        action_mask: How observations mask the actions of a Discrete space, set by make_model; None
            if they do not. Calling the actor, as acting and training do, rules out masked actions,
            so forward need not know of masks.
    """

    action_mask: ActionMask | None = None

    def __call__(self, observation: Nest[Tensor]) -> Tensor:
        """Returns the outputs of forward, with -inf for masked actions."""
        outputs: Tensor = super().__call__(without_task(observation))
        mask = self.action_mask
        return outputs if mask is None else mask.masked(outputs, observation)

    @abstractmethod
    def forward(self, observation: Nest[Tensor]) -> Tensor:
        """Returns what the action is chosen by, [N, ...], of observations [N, *shape]."""

    @abstractmethod
    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Chooses actions by outputs of forward.

        Args:
            outputs: [N, ...].
            mode: "sample" from the policy, "greedy" for its best action, or "explore".
        """

    def choose(self, inputs: ModelInputs, state: Nest[Tensor], mode: Mode) -> Acted:
        """Chooses an action for each environment of a row.

        Args:
            inputs: One row, [1, B, ...].
            state: (), since these networks have no memory.
            mode: "sample" from the policy, "greedy" for its best action, or "explore".
        """
        observation: Nest[Tensor] = map_leaves(lambda leaf: leaf.squeeze(0), inputs.observation)
        action, extras = self.choose_each(self(observation), mode)
        rows = {name: extra.unsqueeze(0) for name, extra in extras.items()}
        return Acted(action.unsqueeze(0), rows, state)


class ActorWithCritics(OffPolicyActor):
    """A policy that makes its own critics. Gives no extras.

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
        if mode != "explore":
            return Chosen(action, {})
        if isinstance(actions, SquashedGaussian):
            uniform = uniform_in(actions, outputs[..., : actions.num_features])
        else:
            assert isinstance(actions, Categorical)
            uniform = uniform_among(actions, outputs)
        return Chosen(self.randomly(action, uniform), {})


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


class Critics(nn.Module, ABC):
    """Two critics, whose smaller value keeps both from rating too high (Fujimoto et al. 2018,
    arXiv 1802.09477, section 4.2).
    """

    def __call__(self, observation: Nest[Tensor], action: Tensor | None = None) -> Tensor:
        """Returns the result of forward, which does not see the number of the task."""
        return super().__call__(without_task(observation), action)

    @abstractmethod
    def forward(self, observation: Nest[Tensor], action: Tensor | None = None) -> Tensor:
        """Returns values [2, N] of actions [N, ...]; without them, [2, N, n] of every action of a
        Discrete space.
        """

    def first(self, observation: Nest[Tensor], action: Tensor) -> Tensor:
        """Returns the first critic's values [N] of actions [N, ...]."""
        return self(observation, action)[0]

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts observations in running statistics, as Actor.observe."""


def uniform_in(distribution: SquashedGaussian, units: Tensor) -> Tensor:
    """Returns a uniformly random action of a Box for each row of units [N, n]."""
    return distribution.in_box(2.0 * torch.rand_like(units) - 1.0)


def uniform_among(distribution: Categorical, outputs: Tensor) -> Tensor:
    """Returns uniformly random actions [N] of those whose outputs [N, n] are not -inf."""
    legal = torch.zeros_like(outputs).masked_fill(outputs.isneginf(), -torch.inf)
    return distribution.sample(legal)


class QNetwork(OffPolicyActor):
    """Estimates the values of the actions of a Discrete space: forward gives q_values float32
    [N, n], -inf for illegal actions. They are its extra.
    """

    def choose_each(self, outputs: Tensor, mode: Mode) -> Chosen:
        """Chooses the best action; exploring, with probability epsilon a random legal one."""
        return Chosen(self.best(outputs, mode), {"q_values": outputs})

    @property
    def extra_specs(self) -> dict[str, ArraySpec]:
        """The extra q_values [n]; raises SpecError unless the action space is Discrete."""
        return {"q_values": ArraySpec((discrete(self).num_params,), "float32")}


def discrete(network: Actor) -> Categorical:
    """Returns the distribution over a Discrete space; raises SpecError for another space's."""
    if not isinstance(network.distribution, Categorical):
        kind = type(network.distribution).__name__
        raise _misfit(network, (Categorical,), f"one with a {kind} distribution")
    return network.distribution


class Body(NamedTuple):
    """The shape of a network between the observation and its head."""

    over_images: type[ImageTorso] | None  # makes the torsos of images
    hidden: int  # units in a layer
    layers: int  # after the torsos
    is_normed: bool = False  # whether these have LayerNorm before their ReLU (Ba et al. 2016)


BODIES = {
    **{name: Body(net.over_images, net.width, 1) for name, net in BUILT_IN.items()},
    "mlp": Body(None, hidden=256, layers=2),
}


class Features(nn.Module):
    """Torsos and hidden layers over one observation space.

    num_features: size of the output. compute_dtype: of the torsos.
    """

    def __init__(self, space: ObservationSpace, body: Body, num_more: int = 0) -> None:
        """num_more: number of further inputs of the first layer."""
        super().__init__()
        check_count("hidden", body.hidden)
        torsos = (torso_for(leaf, body.over_images, FlatTorso) for leaf in flatten(space))
        self.torsos = nn.ModuleList(torsos)
        seen = sum(torso.num_features for torso in self.torsos)  # type: ignore[misc]
        sizes = [seen + num_more, *[body.hidden] * body.layers]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        norm = nn.LayerNorm if body.is_normed else nn.Identity
        self.norms = nn.ModuleList(norm(body.hidden) for _ in self.layers)
        self.num_features = body.hidden

    def forward(
        self, observation: Nest[Tensor], dtype: torch.dtype, more: Sequence[Tensor] = ()
    ) -> Tensor:
        """Returns features float32 [N, num_features] of leaves [N, *shape] and more [N, ...].

        dtype: what the torsos compute in.
        """
        leaves = flatten(without_task(observation))
        with computing_in(dtype, leaves[0].device):
            seen = [torso(leaf) for torso, leaf in zip(self.torsos, leaves, strict=True)]
        features = torch.cat([*(part.float() for part in seen), *more], -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            features = F.relu(norm(layer(features)))
        return features

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts leaves [T, B, *shape] in the torsos' running statistics."""
        for torso, leaf in zip(self.torsos, flatten(without_task(observation)), strict=True):
            torso.observe(leaf.flatten(0, 1))  # type: ignore[operator]


class BuiltIn(OffPolicyActor):
    """Common base of the networks that have names: features, and one layer over them, the head.

    head: the name of that layer, which checkpoints rely on. over: the distributions over actions
    that it supports.
    """

    separable = True
    head = "policy"
    over: ClassVar[tuple[type[ActionDistribution], ...]] = (SquashedGaussian, Categorical)

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, body: Body
    ) -> None:
        """Raises SpecError for actions that the network does not support."""
        super().__init__()
        over_box = SquashedGaussian if SquashedGaussian in self.over else None
        self.distribution = distribution_for(action_space, over_box)
        if not isinstance(self.distribution, self.over):
            kind = type(action_space).__name__
            kind += f" of {action_space.dtype}" if isinstance(action_space, Box) else ""
            raise _misfit(self, self.over, kind)
        self.features = Features(observation_space, body)
        self.add_module(self.head, nn.Linear(body.hidden, self._num_outputs))
        self._space, self._body = observation_space, body

    @property
    def _num_outputs(self) -> int:
        """Number of outputs of the head."""
        return self.distribution.num_params

    def forward(self, observation: Nest[Tensor]) -> Tensor:
        features = self.features(observation, self.compute_dtype)
        return self.get_submodule(self.head)(features)

    def feature_weights(self) -> Iterable[nn.Parameter]:
        return self.features.torsos.parameters()

    def observe(self, observation: Nest[Tensor]) -> None:
        self.features.observe(observation)


class QNet(BuiltIn, QNetwork):
    """A Q-network: features, and a head of action values."""

    head = "q_values"
    over = (Categorical,)


class TwinCritics(Critics):
    """Two networks: of observation and action in a Box, or with a head of all actions."""

    def __init__(self, space: ObservationSpace, body: Body, actions: ActionDistribution) -> None:
        super().__init__()
        num_inputs, num_values = actions.num_features, 1
        if isinstance(actions, Categorical):
            num_inputs, num_values = 0, actions.num_params
        self.features = nn.ModuleList(Features(space, body, num_inputs) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(body.hidden, num_values) for _ in range(2))

    def forward(self, observation: Nest[Tensor], action: Tensor | None = None) -> Tensor:
        """action: float32 [N, num_features] in units of the Box; None for a Discrete."""
        return torch.stack([self._values(number, observation, action) for number in range(2)])

    def first(self, observation: Nest[Tensor], action: Tensor) -> Tensor:
        return self._values(0, observation, action)

    def _values(self, number: int, observation: Nest[Tensor], action: Tensor | None) -> Tensor:
        more = [] if action is None else [action]
        features = self.features[number](observation, torch.float32, more)
        values: Tensor = self.heads[number](features)
        return values if action is None else values.squeeze(-1)

    def observe(self, observation: Nest[Tensor]) -> None:
        for features in self.features:
            features.observe(observation)  # type: ignore[operator]


class SACNet(BuiltIn, StochasticActorCritic):
    """A policy with a squashed Gaussian over a Box, or a categorical over a Discrete."""

    def make_critics(self) -> TwinCritics:
        return TwinCritics(self._space, self._body, self.distribution)


class TD3Net(BuiltIn, DeterministicActorCritic):
    """A deterministic policy over a Box."""

    over = (SquashedGaussian,)

    @property
    def _num_outputs(self) -> int:
        return self.distribution.num_features

    def make_critics(self) -> TwinCritics:
        return TwinCritics(self._space, self._body, self.distribution)


FAMILIES: dict[str, type[BuiltIn]] = {"q": QNet, "pqn": QNet, "sac": SACNet, "td3": TD3Net}
_SPACES = {Categorical: "Discrete", SquashedGaussian: "Box"}  # of distributions


def _misfit(network: Actor, over: Iterable[type[ActionDistribution]], space: str) -> SpecError:
    """Returns the error of a network that does not support its actions.

    over: the distributions that the network supports. space: names the action space.
    """
    needed = " or ".join(_SPACES[distribution] for distribution in over)
    return SpecError(
        f"{type(network).__name__} needs a {needed} action space, got {space}: use dqn or pqn for "
        "discrete actions, td3 for continuous ones, sac for either, impala or ppo for all others"
    )


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
            "off-policy algorithms train on single steps, which have no recurrent state: remove "
            "use_lstm, or use r2d2, impala or ppo"
        )
    shape = BODIES[body]._replace(is_normed=family == "pqn")
    shape = shape if hidden is None else shape._replace(hidden=hidden)
    return FAMILIES[family](observation_space, action_space, shape)


CORE_STATE = "core_state"


class RecurrentQNetwork(Exploring, ActorCritic):
    """Estimates the values of the actions of a Discrete space, from what it remembers, for R2D2.

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
        both = zip(parts, leaves, strict=True)
        rows = [part.reshape(len(joined), *leaf[:, 0].shape) for part, leaf in both]
        return pack_as(usual, [row.transpose(0, 1).contiguous() for row in rows])


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


NETWORKS: Mapping[str, Callable[..., Actor]] = {
    **{f"{family}-{body}": partial(_made, family, body) for family in FAMILIES for body in BODIES},
    **{f"r2d2-{name}": _dueling(net) for name, net in BUILT_IN.items()},
}
