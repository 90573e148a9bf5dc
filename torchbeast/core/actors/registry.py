# SPDX-License-Identifier: Apache-2.0
"""Models by name: the built-in ones, or a user's "my_module:MyNet"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Acted, Actor, ActorCritic, ModelInputs
from torchbeast.core.actors.masks import KEY, has_mask, mask_for
from torchbeast.core.actors.networks import (
    AtariNet,
    DeepNet,
    FixupNet,
    MLPNet,
    NormedAtariNet,
    SmallNet,
)
from torchbeast.core.ambient import own_settings
from torchbeast.core.distributions import ActionDistribution, distribution_for
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, ObservationSpace
from torchbeast.core.nest_py import flatten, map_leaves, map_leaves2
from torchbeast.core.specs import ActorSpec, SpecError, check_takes, did_you_mean

if TYPE_CHECKING:
    from torchbeast.core.actors.off_policy import OffPolicyActor

ModelFactory = Callable[..., Actor]  # (observation_space, action_space, use_lstm, **kwargs)

ACTOR_CRITICS: dict[str, ModelFactory] = {
    "deep": DeepNet,
    "fixup": FixupNet,
    "shallow": AtariNet,
    "shallow-norm": NormedAtariNet,
    "small": SmallNet,
    "mlp": MLPNet,
}
OFF_POLICY = tuple(f"{family}-{body}" for family in ("q", "sac", "td3") for body in ACTOR_CRITICS)
MODELS = (*ACTOR_CRITICS, *OFF_POLICY)
"""Names of the built-in networks. Those of off_policy_networks.py are imported when one is made."""


def in_family(spec: ActorSpec, family: str) -> ActorSpec:
    """Returns the spec with the built-in network of a family in place of an actor-critic.

    spec: of one of ACTOR_CRITICS, or "auto"; any other stays. family: such as "q"; "" for
    actor-critics.
    """
    is_open = spec.name in (*ACTOR_CRITICS, "auto") and not spec.pickled
    return dataclasses.replace(spec, name=f"{family}-{spec.name}") if family and is_open else spec


def make_model(
    spec: ActorSpec, observation_space: ObservationSpace, action_space: ActionSpace
) -> Actor:
    """Makes the model of a spec, and checks that it keeps the contract.

    observation_space: as the policy sees it, with frames stacked. A name with a colon,
    "my_module:MyNet", is imported and called with (observation_space, action_space, use_lstm) and
    the spec's keyword arguments. A model that sets no distribution gets that of the action space.

    Raises SpecError when there is no such model, when it does not take the keyword arguments, and
    when it or its outputs break the contract of an Actor. Exceptions of the model's own code are
    passed on as they are.
    """
    if not flatten(observation_space):
        raise SpecError("a model needs an observation with at least one array, got none")
    factory = _factory(spec)
    check_takes(factory, spec.kwargs, f"model {spec.name}", positional=3)
    with own_settings():  # after the import, which may set others
        model = factory(observation_space, action_space, spec.use_lstm, **spec.kwargs)
        return _finished(model, spec, observation_space, action_space)


def _finished(
    model: Any, spec: ActorSpec, observation_space: ObservationSpace, action_space: ActionSpace
) -> Actor:
    """Returns the model with what make_model sets; raises SpecError."""
    name = spec.name
    if not isinstance(model, Actor):
        raise SpecError(
            f"model {name} is a {type(model).__name__}, not an actor: "
            "it must be a subclass of torchbeast.core.actors.contract.ActorCritic or Actor"
        )
    if not hasattr(model, "distribution"):
        model.distribution = distribution_for(action_space)
    model.reward_input = spec.reward_input
    check_model(model, observation_space, name)
    _add_mask(model, observation_space, name)
    return model


def _add_mask(model: Actor, observation_space: ObservationSpace, name: str) -> None:
    """Lets the model rule out actions that observations mask; SpecError where it cannot."""
    if isinstance(model, ActorCritic) or _is_off_policy(model):
        model.action_mask = mask_for(observation_space, model.distribution)
    elif has_mask(observation_space):
        raise SpecError(
            f"observations have an {KEY}, which {name} would not obey: make it a subclass of "
            f"{ActorCritic.__name__} or OffPolicyActor, or drop the mask with --observation_keys"
        )


def _is_off_policy(model: Actor) -> TypeGuard[OffPolicyActor]:
    from torchbeast.core.actors.off_policy import OffPolicyActor

    return isinstance(model, OffPolicyActor)


def check_model(model: Actor, observation_space: ObservationSpace, name: str) -> None:
    """Raises SpecError unless inputs of zeros give outputs of the contract's shapes.

    It uses no random numbers.
    """
    state = model.initial_state(3)
    if isinstance(model, ActorCritic):
        with torch.inference_mode():
            output = model(_zero_inputs(observation_space, model.distribution, 2), state)
        num_params = model.distribution.num_params
        _check_shape(name, "policy_logits", output.policy_logits, (2, 3, num_params))
        _check_shape(name, "baseline", output.baseline, (2, 3))
        _check_state(name, state, output.core_state)
    acted = model.act(_zero_inputs(observation_space, model.distribution, 1), state, "greedy")
    _check_acted(name, model, acted)
    _check_state(name, state, acted.state)


def _factory(spec: ActorSpec) -> ModelFactory:
    if spec.name in ACTOR_CRITICS:
        return ACTOR_CRITICS[spec.name]
    if spec.name in OFF_POLICY:
        from torchbeast.core.actors.off_policy_networks import NETWORKS

        return NETWORKS[spec.name]
    if not spec.pickled and ":" not in spec.name:
        known, hint = ", ".join(ACTOR_CRITICS), did_you_mean(spec.name, MODELS)
        raise SpecError(f"no model {spec.name!r}: use {known}, or my_module:MyNet{hint}")
    factory = spec.load()
    is_class = isinstance(factory, type) and issubclass(factory, Actor)
    if spec.kwargs and not spec.pickled and not is_class:  # a checkpoint could name any function
        raise SpecError(
            f"model {spec.name}: keyword arguments are only given to a subclass of "
            f"torchbeast.core.actors.contract.ActorCritic or Actor, got {factory!r}: "
            "name the class, or leave out --model_kwargs"
        )
    return factory


def _zero_inputs(
    observation_space: ObservationSpace, actions: ActionDistribution, rows: int
) -> ModelInputs:
    """Returns inputs of zeros, [rows, 3, ...]."""

    def zeros(spec: ArraySpec) -> Tensor:
        return torch.zeros((rows, 3, *spec.shape), dtype=getattr(torch, spec.dtype))

    return ModelInputs(
        observation=map_leaves(zeros, observation_space),
        reward=torch.zeros(rows, 3),
        done=torch.zeros(rows, 3, dtype=torch.bool),
        last_action=actions.zero_action((rows, 3)),
    )


def _check_acted(name: str, model: Actor, acted: Acted) -> None:
    """Raises SpecError unless action and extras have the declared names, shapes and dtypes."""
    if sorted(acted.extras) != sorted(model.extra_specs):
        raise SpecError(
            f"model {name} returns the extras {sorted(acted.extras)}, "
            f"but its extra_specs declare {sorted(model.extra_specs)}: make them agree"
        )
    expected = {
        key: torch.empty((1, 3, *spec.shape), dtype=getattr(torch, spec.dtype))
        for key, spec in model.extra_specs.items()
    }

    def check(found: Tensor, wanted: Tensor) -> None:
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise ValueError(
                f"{found.dtype} {list(found.shape)} for 1 step of 3 environments, "
                f"expected {wanted.dtype} {list(wanted.shape)}"
            )

    try:
        what = "action"
        map_leaves2(check, acted.action, model.distribution.zero_action((1, 3)))
        for what, wanted in expected.items():
            check(acted.extras[what], wanted)
    except ValueError as error:
        raise SpecError(f"model {name}: {what} does not fit: {error}") from error


def _check_shape(name: str, what: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise SpecError(
            f"model {name}: {what} has shape {list(tensor.shape)} for 2 steps of 3 environments, "
            f"expected {list(expected)}"
        )


def _check_state(name: str, initial: Any, after: Any) -> None:
    def check(a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape or a.dim() < 2 or a.shape[1] != 3:
            shapes = f"{list(a.shape)} before, {list(b.shape)} after"
            raise ValueError(f"{shapes}, expected [layers, 3, ...]")

    try:
        map_leaves2(check, initial, after)
    except ValueError as error:
        raise SpecError(f"model {name}: the recurrent state does not fit: {error}") from error
