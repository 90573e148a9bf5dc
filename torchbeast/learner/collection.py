# SPDX-License-Identifier: Apache-2.0
"""Makes the agent of a scheme, the source that collects for it, and the weights that act."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from torchbeast.core.actors.registry import Agent, make_agent
from torchbeast.core.specs import ActorSpec, Precision
from torchbeast.envs.families import spec_of
from torchbeast.envs.spec import EnvSpec
from torchbeast.learning.assemble import MakeAgent
from torchbeast.learning.collection import process_source
from torchbeast.learning.weights import PublishedWeights
from torchbeast.schemes.scheme import Scheme
from torchbeast.sources.contract import Learner, Publisher, Source


def env_spec(scheme: Scheme) -> EnvSpec:
    """Returns the spec of the environments; raises SpecError where workers cannot be sent it."""
    envs = scheme.train_envs_factory
    spec = spec_of(envs.env_fn, envs.env_kwargs, is_sent=scheme.col_remote_workers > 0)
    if not envs.info_keywords:
        return spec
    options = dataclasses.replace(spec.options, info_keywords=envs.info_keywords)
    return dataclasses.replace(spec, options=options)


def making_agent(scheme: Scheme) -> MakeAgent:
    """Returns a function that makes the agent of the scheme for a spec of its network."""
    envs = scheme.train_envs_factory

    def make(spec: ActorSpec) -> Agent:
        agent = make_agent(spec, envs.sent_space, envs.action_space, envs.frame_stack)
        scheme.actor_factory.restart(agent.model)
        return agent

    return make


def make_weights(scheme: Scheme, model: nn.Module, version: int) -> Publisher:
    """Returns the published weights."""
    if scheme.col_remote_workers and scheme.inference == "worker":
        from torchbeast.sources.processes.weights import SharedWeights, ring_size

        return SharedWeights(model, version, ring_size(scheme.processes.fixed_lag))
    return PublishedWeights(model, version)


def make_source(
    scheme: Scheme,
    learner: Learner[Any],
    precision: Precision,
    ending: ExitStack,
    stops_early: Callable[[float], bool] | None = None,
) -> Source:
    """Returns the source; `ending` closes its environments or ends its workers.

    precision: of the features of actors. stops_early: see LocalSource, which alone asks for it.
    """
    env, on_demand = env_spec(scheme), scheme.synchronous_rollouts > 0
    if scheme.inference == "central":
        from torchbeast.learner.served import served_source  # compiled

        served = served_source(scheme, env, learner, ending)
        ending.callback(served.end)
        return served
    if scheme.col_backend == "ray":
        from torchbeast.learner.fleets import collecting_fleet
        from torchbeast.sources.processes.source import FleetSource

        fleet = ending.enter_context(collecting_fleet(scheme, env))
        workers, lag = scheme.col_remote_workers, scheme.processes.fixed_lag
        return FleetSource(learner, env, precision, fleet, scheme.ray, workers, lag, on_demand)
    if scheme.col_remote_workers:
        return process_source(learner, env, precision, scheme.processes, on_demand, ending)
    from torchbeast.sources.local.source import LocalSource

    keywords, make = env.options.info_keywords, scheme.train_envs_factory.make
    played = LocalSource(learner, keywords, precision, make, scheme.num_envs, stops_early)
    ending.callback(played.end)
    return played
