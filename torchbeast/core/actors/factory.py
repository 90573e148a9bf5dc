# SPDX-License-Identifier: Apache-2.0
"""Actors as components: a network that is made again in every process that acts or learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchbeast.core.actors.agent import default_model
from torchbeast.core.actors.contract import Actor, ActorCritic
from torchbeast.core.actors.off_policy import OffPolicyActor
from torchbeast.core.actors.registry import (
    ACTOR_CRITICS,
    ModelFactory,
    in_family,
    make_model,
)
from torchbeast.core.checks import require
from torchbeast.core.envs.spaces import ActionSpace, ObservationSpace
from torchbeast.core.factories import names_checked
from torchbeast.core.specs import ActorSpec

EXTRACTORS = {"MLP": "mlp", "CNN": "shallow", "Fixup": "fixup", "ResNet": "deep"}
"""The networks by the names of their feature extractors."""


def get_feature_extractor(name: str) -> ModelFactory:
    """Returns the network with this feature extractor: MLP (two layers), CNN (three convolutions,
    for Atari), Fixup (a residual network without normalisation that starts as the identity) or
    ResNet (IMPALA's residual network). Raises ValueError for another name.
    """
    if name not in EXTRACTORS:
        raise ValueError(f"no feature extractor {name!r}: use {', '.join(EXTRACTORS)}")
    return ACTOR_CRITICS[EXTRACTORS[name]]


@dataclass(frozen=True, kw_only=True)
class ActorFactory:
    """Makes an actor; see OnPolicyActorCritic.create_factory and OffPolicyActorCritic's."""

    owner: str  # the class whose create_factory made it
    spec: ActorSpec
    observation_space: ObservationSpace  # as the policy sees it, with frames stacked
    action_space: ActionSpace
    kind: type[Actor]  # of actor
    family: str = ""  # of built-in networks, see Algorithm.family
    restart_model: Path | None

    def __call__(self, device: torch.device | str) -> Actor:
        """Makes the actor on a device, with weights of restart_model if there is one."""
        spec = in_family(self.spec, self.family)
        actor = make_model(spec, self.observation_space, self.action_space).to(device)
        self.restart(actor)
        return actor

    def trained_by(self, family: str) -> ActorFactory:
        """Returns the factory of the network that algorithms of a family train."""
        return dataclasses.replace(self, family=family)

    def restart(self, actor: Actor) -> None:
        """Loads the weights of restart_model; a no-op without one."""
        if self.restart_model is not None:
            saved = _weights_in(self.restart_model)
            actor.load_state_dict(saved.get("model_state_dict", saved))


def _weights_in(path: Path) -> dict[str, Any]:
    """Returns a checkpoint or a state_dict; raises ValueError if the file has neither."""
    needed = "give a checkpoint such as model.tar, or a state_dict that torch.save wrote"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"restart_model {path} is not there: {needed}") from None
    except Exception as error:  # torch has no single type for a file that is none of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"restart_model {path} has no weights ({reason}): {needed}") from error
    require(isinstance(saved, dict), f"restart_model {path} has no weights: {needed}")
    return dict(saved)


class OnPolicyActorCritic:
    """Actors with a policy and a value, as PPO, IMPALA and LASER train them: every ActorCritic."""

    @classmethod
    @names_checked
    def create_factory(
        cls,
        obs_space: ObservationSpace,
        action_space: ActionSpace,
        feature_extractor_network: ModelFactory | str = "auto",
        feature_extractor_kwargs: Mapping[str, Any] = MappingProxyType({}),
        recurrent: bool = False,
        restart_model: str | Path | None = None,
    ) -> ActorFactory:
        """Returns what makes the network wherever it acts or learns.

        obs_space, action_space: those that VecEnv.create_factory returns.
        feature_extractor_network: what get_feature_extractor returns, the name of a network
            (docs/observations.md), or your own subclass of ActorCritic, which is called with
            (obs_space, action_space, recurrent). Default: by the observations.
        feature_extractor_kwargs: further keyword arguments of it, such as {"hidden": 64}; JSON.
        recurrent: whether it has an LSTM; with {"core": "gru"} among the keyword arguments, a GRU.
        restart_model: file of weights to begin with: a checkpoint, or a state_dict.
        """
        network = feature_extractor_network
        if network == "auto":
            network = default_model(obs_space, for_images="shallow")
        return ActorFactory(
            owner=cls.__name__,
            spec=_spec(network, feature_extractor_kwargs, recurrent),
            observation_space=obs_space,
            action_space=action_space,
            kind=ActorCritic,
            restart_model=None if restart_model is None else Path(restart_model),
        )


class OffPolicyActorCritic:
    """Actors that see single observations, as DQN, SAC and TD3 train them: every OffPolicyActor.

    The algorithm decides what is built over the feature extractor: the values of actions, or a
    policy with critics, which are the algorithm's. Until it is known, a policy.
    """

    @classmethod
    @names_checked
    def create_factory(
        cls,
        obs_space: ObservationSpace,
        action_space: ActionSpace,
        feature_extractor_network: ModelFactory | str = "auto",
        feature_extractor_kwargs: Mapping[str, Any] = MappingProxyType({}),
        restart_model: str | Path | None = None,
    ) -> ActorFactory:
        """Returns what makes the network wherever it acts or learns.

        feature_extractor_network: what get_feature_extractor returns, the name of a network, or
            your own subclass of OffPolicyActor, which is called with
            (obs_space, action_space, False). Default: by the observations.
        Others: see OnPolicyActorCritic.
        """
        network = feature_extractor_network
        if network == "auto":
            network = default_model(obs_space, for_images="shallow")
        return ActorFactory(
            owner=cls.__name__,
            spec=_spec(network, feature_extractor_kwargs, recurrent=False),
            observation_space=obs_space,
            action_space=action_space,
            kind=OffPolicyActor,  # type: ignore[type-abstract]
            family="sac",
            restart_model=None if restart_model is None else Path(restart_model),
        )


def _spec(network: ModelFactory | str, kwargs: Mapping[str, Any], recurrent: bool) -> ActorSpec:
    """Returns the spec of a network; a built-in one has its name."""
    built_in = [name for name, made in ACTOR_CRITICS.items() if made is network]
    source = built_in[0] if built_in else network
    return ActorSpec.of(source, kwargs, use_lstm=recurrent)
