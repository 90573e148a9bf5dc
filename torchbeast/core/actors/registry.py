# SPDX-License-Identifier: Apache-2.0
"""Networks by name, made for the spaces of an environment, wherever they act or learn.

A name is a built-in network's, "auto", or a user's "my_module:MyNet".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torchbeast.core.actors import contract
from torchbeast.core.actors.distributions import ActionDistribution, distribution_for
from torchbeast.core.actors.encoders import Kind, is_large_image, kind_of, readings
from torchbeast.core.actors.networks import BUILT_IN
from torchbeast.core.base.checks import did_you_mean, first_of, in_any_case
from torchbeast.core.base.computing import numpys_scalars, own_settings
from torchbeast.core.base.nest import flatten, map_leaves2
from torchbeast.core.base.specs import ActorSpec, SpecError, check_takes, values_in
from torchbeast.core.envs.contract import MASK
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, ObservationSpace, without_values
from torchbeast.core.envs.tasks import num_tasks, without_task
from torchbeast.errors import RunError, UsageError, expanded, what_it_raised

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm

ModelFactory = Callable[
    ..., contract.Actor
]  # (observation_space, action_space, use_lstm, **kwargs)

ACTOR_CRITICS: Mapping[str, ModelFactory] = BUILT_IN
OFF_POLICY = tuple(
    f"{family}-{body}" for family in ("q", "pqn", "sac", "td3", "r2d2") for body in ACTOR_CRITICS
)
MODELS = (*ACTOR_CRITICS, *OFF_POLICY)
"""Names of the built-in networks. The module of OFF_POLICY is imported when one is made."""


def in_family(spec: ActorSpec, family: str, network: Mapping[str, Any]) -> ActorSpec:
    """Returns the spec of the built-in network that an algorithm trains.

    spec: of one of ACTOR_CRITICS, or "auto"; any other stays. family: such as "q", whose network
    takes the place of the actor-critic; "" for actor-critics. network: keyword arguments where the
    spec has no others.
    """
    if spec.name not in (*ACTOR_CRITICS, "auto") or spec.pickled:
        return spec
    name = f"{family}-{spec.name}" if family else spec.name
    return replace(spec, name=name, kwargs={**network, **spec.kwargs})


def make_model(
    spec: ActorSpec, observation_space: ObservationSpace, action_space: ActionSpace
) -> contract.Actor:
    """Makes the model of a spec, and checks that it keeps the contract.

    observation_space: as the policy sees it, with frames stacked. A name with a colon,
    "my_module:MyNet", is imported and called with (observation_space, action_space, use_lstm) and
    the spec's keyword arguments. A model that sets no distribution gets the action space's.

    Raises SpecError when there is no such model, when it does not take the keyword arguments, and
    when it or its outputs break the contract of an Actor. Exceptions of the model's own code are
    passed on as they are.
    """
    factory, name = _factory(spec), spec.name
    check_takes(factory, spec.kwargs, f"model {name}", positional=3)
    with own_settings():  # after the import, which may set others
        seen = without_task(observation_space)
        model: Any = factory(seen, action_space, spec.use_lstm, **spec.kwargs)
        if not isinstance(model, contract.Actor):
            raise SpecError(
                f"model {name} made a {type(model).__name__}, which cannot act: make it a subclass "
                "of torchbeast.core.actors.contract.ActorCritic or Actor"
            )
        if not hasattr(model, "distribution"):
            model.distribution = distribution_for(action_space)
        model.reward_input = spec.reward_input
        contract.repeat_value_head(model, num_tasks(observation_space))
        check_model(model, observation_space, name)
        if hasattr(model, "action_mask"):
            setattr(model, "action_mask", contract.mask_for(observation_space, model.distribution))  # noqa: B010
        elif contract.has_mask(observation_space):
            raise SpecError(
                f"observations have an {MASK}, which {name} would ignore: make it a subclass of "
                "ActorCritic or OffPolicyActor, or drop the mask with observation_keys"
            )
        return model


def check_model(model: contract.Actor, observation_space: ObservationSpace, name: str) -> None:
    """Raises SpecError unless inputs of zeros give outputs of the contract's shapes.

    It uses no random numbers.
    """
    state, actions = model.initial_state(3), model.distribution
    with torch.no_grad():  # not inference mode, as `act`: it may keep a tensor for training
        if isinstance(model, contract.ActorCritic):
            output = model(_zero_inputs(observation_space, actions, 2), state)
        acted = model.choose(_zero_inputs(observation_space, actions, 1), state, "greedy")
    if isinstance(model, contract.ActorCritic):
        logits = torch.empty(2, 3, actions.num_params)
        _check(name, "policy_logits", output.policy_logits, logits)
        _check(name, "baseline", output.baseline, torch.empty(2, 3))
        _check_state(name, state, output.core_state)
    _check(name, "action", acted.action, actions.zero_action((1, 3)))
    _check(name, "an extra", acted.extras, contract.zeros_of(model.extra_specs, 1, 3))
    _check_state(name, state, acted.state)


def is_actor_class(spec: ActorSpec) -> bool:
    """Whether a spec, if it names a function of some module, names a subclass of Actor.

    A checkpoint of anyone may name any function, which must not get arguments of its choice.
    """
    if spec.pickled or ":" not in spec.name:
        return True
    factory = spec.load()
    return isinstance(factory, type) and issubclass(factory, contract.Actor)


def _factory(spec: ActorSpec) -> ModelFactory:
    if spec.name in ACTOR_CRITICS:
        return ACTOR_CRITICS[spec.name]
    if spec.name in OFF_POLICY:
        from torchbeast.core.actors import off_policy

        return off_policy.NETWORKS[spec.name]
    if not spec.pickled and ":" not in spec.name:
        known, hint = ", ".join(ACTOR_CRITICS), did_you_mean(spec.name, MODELS)
        raise SpecError(f"no model {spec.name!r}: use {known}, or my_module:MyNet{hint}")
    factory = spec.load()
    if spec.kwargs and not is_actor_class(spec):  # a checkpoint could name any function
        raise SpecError(
            f"model {spec.name}: keyword arguments are only given to a subclass of "
            f"torchbeast.core.actors.contract.ActorCritic or Actor, got {factory!r}: name the "
            "class, or remove model_kwargs"
        )
    return factory


def _zero_inputs(
    observation_space: ObservationSpace, actions: ActionDistribution, rows: int
) -> contract.ModelInputs:
    """Returns inputs of zeros, [rows, 3, ...]."""
    return contract.ModelInputs(
        observation=contract.zeros_of(observation_space, rows, 3),
        reward=torch.zeros(rows, 3),
        done=torch.zeros(rows, 3, dtype=torch.bool),
        last_action=actions.zero_action((rows, 3)),
    )


def _check(name: str, what: str, output: Any, wanted: Any) -> None:
    """Raises SpecError unless both are nests of tensors of the same shapes and dtypes."""

    def check(output: Tensor, wanted: Tensor) -> None:
        if output.shape != wanted.shape or output.dtype != wanted.dtype:
            raise ValueError(
                f"{output.dtype} {list(output.shape)} for 3 environments, expected "
                f"{wanted.dtype} {list(wanted.shape)}"
            )

    try:
        map_leaves2(check, output, wanted)
    except ValueError as error:
        raise SpecError(f"model {name}: {what} does not fit: {error}") from error


def _check_state(name: str, initial: Any, after: Any) -> None:
    _check(name, "the recurrent state", after, initial)
    for leaf in flatten(initial):
        if leaf.dim() < 2 or leaf.shape[1] != 3:
            raise SpecError(
                f"model {name}: the recurrent state does not fit: {list(leaf.shape)} for 3 "
                "environments, expected [layers, 3, ...]"
            )


_NAMED = 6  # parts of an observation that are named at the start of a run


def describe_agent(agent: contract.Agent) -> str:
    """Returns a line for the start of a run: the network and its inputs."""
    core = str(agent.spec.kwargs.get("core", "lstm")).upper()
    name = f"Network: {agent.spec.name}{f' with {core}' * agent.spec.use_lstm}"
    if agent.spec.name not in MODELS:
        return f"{name} (custom)"
    read = [
        f"{path or 'observation'} ({kind}, shape {list(spec.shape)})"
        for path, spec, kind in readings(without_task(agent.observation_space))
    ]
    return f"{name}; inputs: {first_of(read, _NAMED)}"


def make_agent(
    spec: ActorSpec,
    observation_space: ObservationSpace,
    action_space: ActionSpace,
    frame_stack: int,
    for_images: str = "deep",
) -> contract.Agent:
    """Makes the agent for an observation space and an action space.

    Args:
        spec: Describes the network.
        observation_space: Nest of ArraySpec of one environment, before frames are stacked.
        action_space: Nest of spaces of one environment.
        frame_stack: Number of frames in a stack.
        for_images: The network that "auto" selects for observations with an image.

    Raises:
        UsageError: If there is no such network, or it does not fit the spaces.
        RunError: If a network that is not built in raises an exception; with its traceback.

    Example:
        ```python
        agent = make_agent(ActorSpec("mlp"), ArraySpec((4,), "float32"), Discrete(2), frame_stack=1)
        ```
    """
    seen = stacked_space(observation_space, frame_stack)
    if not spec.reads_values:
        seen = without_values(seen)
    name = spec.name
    if ":" not in name and name.endswith("auto"):  # "q-auto" too
        name = name.removesuffix("auto") + default_model(seen, for_images)
    reads_values = seen != without_values(seen)
    resolved = replace(spec, name=name, reads_values=reads_values)
    try:
        model = make_model(resolved, seen, action_space)
    except UsageError:
        raise
    except Exception as error:
        if name not in MODELS:
            raise RunError(f"the model {name} failed: {what_it_raised(error)}") from error
        given = f" with {values_in(spec.kwargs)}" if spec.kwargs else ""
        raise UsageError(
            f"the model {name}{given} cannot be made for this environment: {error}"
        ) from error
    return contract.Agent(model, resolved, seen, frame_stack, observation_space, action_space)


def default_model(observation_space: ObservationSpace, for_images: str) -> str:
    """Returns the model that "auto" selects.

    That is `for_images` if a leaf is an image of sufficient size, "small" for smaller images and
    maps, and "mlp" for everything else.
    """
    specs: list[ArraySpec] = flatten(without_task(observation_space))
    if any(is_large_image(spec) for spec in specs):
        return for_images
    # An image of two dimensions may be any table: its neighbouring entries need not be related.
    kinds = {
        kind_of(spec) for spec in specs if kind_of(spec) is not Kind.IMAGE or len(spec.shape) > 2
    }
    return "small" if kinds & {Kind.IMAGE, Kind.MAP, Kind.STRINGS} else "mlp"


EXTRACTORS = {"MLP": "mlp", "CNN": "shallow", "Fixup": "fixup", "ResNet": "deep"}
"""The networks by the names of their feature extractors."""


def get_feature_extractor(name: str) -> ModelFactory:
    """Returns the network with this feature extractor.

    Args:
        name: "MLP" (the network mlp: two layers), "CNN" (shallow: three convolutions, for Atari),
            "Fixup" (fixup: a residual network without normalisation that starts as the identity),
            or "ResNet" (deep: IMPALA's residual network).

    Raises:
        ValueError: For another name.
    """
    name = in_any_case(name, EXTRACTORS)
    if name not in EXTRACTORS:
        raise ValueError(f"no feature extractor {name!r}: use {', '.join(EXTRACTORS)}")
    return ACTOR_CRITICS[EXTRACTORS[name]]


@dataclass(frozen=True, kw_only=True)
class ActorFactory:
    """Makes an actor; see OnPolicyActorCritic.create_factory and
    OffPolicyActorCritic.create_factory.

    Attributes:
        owner: The class whose create_factory made it.
        spec: Describes the network.
        observation_space: The observation space as the policy sees it, with frames stacked.
        action_space: The action space.
        family: The family of built-in networks, see Algorithm.family.
        network: Their keyword arguments, see Algorithm.network.
        restart_model: A file with the initial weights.
    """

    owner: str
    spec: ActorSpec
    observation_space: ObservationSpace
    action_space: ActionSpace
    family: str = ""
    network: Mapping[str, Any] = field(default_factory=dict)
    restart_model: Path | None

    def __call__(self, device: torch.device | str) -> contract.Actor:
        """Makes the actor on a device, with weights of restart_model if there is one."""
        spec = in_family(self.spec, self.family, self.network)
        actor = make_model(spec, self.observation_space, self.action_space).to(device)
        self.restart(actor)
        return actor

    def __repr__(self) -> str:
        network, recurrent = self.spec.name, self.spec.use_lstm
        return f"{self.owner}.create_factory(..., {network!r}, recurrent={recurrent})"

    def trained_by(self, algo: type[Algorithm[Any]]) -> ActorFactory:
        """Returns the factory of the network that an algorithm trains."""
        return replace(self, family=algo.family, network=algo.network)

    def restart(self, actor: contract.Actor) -> None:
        """Loads the weights of restart_model; a no-op without one."""
        if self.restart_model is not None:
            with numpys_scalars():
                saved = torch.load(self.restart_model, map_location="cpu", weights_only=True)
            actor.load_state_dict(saved.get("model_state_dict", saved))


class _Networks:
    """The networks of one kind of algorithm.

    Attributes:
        family: The family of built-in networks, until the algorithm is known.
    """

    family: ClassVar[str] = ""

    @classmethod
    def create_factory(
        cls,
        obs_space: ObservationSpace,
        action_space: ActionSpace,
        feature_extractor_network: ModelFactory | str = "auto",
        feature_extractor_kwargs: Mapping[str, Any] = MappingProxyType({}),
        recurrent: bool = False,
        restart_model: str | Path | None = None,
    ) -> ActorFactory:
        """Returns a factory that makes the network on any machine.

        Args:
            obs_space: The observation space that VecEnv.create_factory returned.
            action_space: The action space that VecEnv.create_factory returned.
            feature_extractor_network: The result of get_feature_extractor, the name of a network
                such as "mlp", or your own subclass of ActorCritic or OffPolicyActor, which is
                called with (obs_space, action_space, recurrent). Default: a network that suits the
                observations.
            feature_extractor_kwargs: Further keyword arguments of the network, such as {"hidden":
                64}; JSON.
            recurrent: Whether it has an LSTM, or with {"core": "gru"} or {"core": "gtrxl"} among
                the keyword arguments a GRU or a gated transformer-XL. R2D2 needs it; DQN, PQN, SAC
                and TD3 train on single steps.
            restart_model: A file with the initial weights: a checkpoint, or a state_dict.

        Returns:
            The `actor_factory` of a Scheme.

        Example:
            ```python
            OnPolicyActorCritic.create_factory(obs_space, action_space, "mlp", {"hidden": 64})
            ```
        """
        network = _named(feature_extractor_network, obs_space)
        return ActorFactory(
            owner=cls.__name__,
            spec=ActorSpec.of(network, feature_extractor_kwargs, use_lstm=recurrent),
            observation_space=obs_space,
            action_space=action_space,
            family=cls.family,
            restart_model=None if restart_model is None else expanded(restart_model),
        )


class OnPolicyActorCritic(_Networks):
    """Networks with a policy and a value, for PPO, IMPALA, LASER and R2D2: every ActorCritic."""


class OffPolicyActorCritic(_Networks):
    """Networks of single observations, for DQN, PQN, SAC and TD3: every OffPolicyActor.

    The algorithm decides what is built over the feature extractor: the values of actions, or a
    policy with critics.
    """

    family = "sac"


def _named(network: ModelFactory | str, space: ObservationSpace) -> ModelFactory | str:
    """Returns the name of a built-in network, also in place of "auto", or the network itself."""
    if network == "auto":
        return default_model(space, for_images="shallow")
    return next((name for name, made in ACTOR_CRITICS.items() if made is network), network)
