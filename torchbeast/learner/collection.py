# SPDX-License-Identifier: Apache-2.0
"""Makes the source of a scheme, and the weights that it acts with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from torchbeast.core.specs import Precision
from torchbeast.envs.families import spec_of
from torchbeast.envs.spec import EnvSpec
from torchbeast.learning.learner_run import Learner
from torchbeast.learning.weights import PublishedWeights, Publisher
from torchbeast.schemes.scheme import Scheme
from torchbeast.sources.contract import Source


class EndingSource(Source, Protocol):
    """A source that ends what it has started."""

    def end(self) -> None:
        """Closes environments, or ends workers."""


def env_spec(scheme: Scheme) -> EnvSpec:
    """Returns the spec of the environments; raises SpecError where workers cannot be sent it."""
    envs = scheme.train_envs_factory
    spec = spec_of(envs.env_fn, envs.env_kwargs, is_sent=scheme.col_remote_workers > 0)
    if not envs.info_keywords:
        return spec
    options = dataclasses.replace(spec.options, info_keywords=envs.info_keywords)
    return dataclasses.replace(spec, options=options)


def make_weights(scheme: Scheme, model: nn.Module, version: int) -> Publisher:
    """Returns the published weights."""
    if scheme.col_backend == "ray":
        from torchbeast.schemes.ray_source import FleetWeights

        return FleetWeights(model, version)
    if scheme.col_remote_workers and scheme.inference == "worker":
        from torchbeast.sources.processes.shared_weights import SharedWeights
        from torchbeast.sources.processes.source import ring_size

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
    if scheme.col_backend == "ray":
        made = _ray(scheme, learner, precision, ending)
    elif scheme.inference == "central":
        made = _servers(scheme, learner, ending)
    elif scheme.col_remote_workers:
        made = _processes(scheme, learner, precision)
    else:
        made = _local(scheme, learner, precision, stops_early)
    ending.callback(made.end)
    return made


def _servers(scheme: Scheme, learner: Learner[PublishedWeights], ending: ExitStack) -> EndingSource:
    from torchbeast.learner.served import served_source  # compiled

    return served_source(scheme, env_spec(scheme), learner, ending)


def _local(
    scheme: Scheme,
    learner: Learner[PublishedWeights],
    precision: Precision,
    stops_early: Callable[[float], bool] | None,
) -> EndingSource:
    from torchbeast.sources.local.source import LocalSource, LocalSourceConfig

    config = LocalSourceConfig(
        num_envs=scheme.num_envs,
        precision=precision,
        rollouts=learner.rollouts,
        extras=learner.extras,
        mode=learner.mode,
        num_batches=learner.batches_at_once,
        spare_columns=learner.spare_columns,
        info_keywords=env_spec(scheme).options.info_keywords,
        seed=learner.seed,
        stops_early=stops_early,
    )
    make_env = scheme.train_envs_factory.make
    device = learner.compute.device
    return LocalSource(learner.agent, learner.weights, device, make_env, config)


def _processes(scheme: Scheme, learner: Learner[Any], precision: Precision) -> EndingSource:
    from torchbeast.sources.processes.source import MonoSource, MonoSourceConfig

    config = MonoSourceConfig(
        env=env_spec(scheme),
        actor=learner.agent.spec,
        precision=precision,
        processes=scheme.processes,
        rollouts=learner.rollouts,
        extras=learner.extras,
        mode=learner.mode,
        num_batches=1 + learner.batches_at_once,
        spare_columns=learner.spare_columns,
        on_demand=scheme.synchronous_rollouts > 0,
        seed=learner.seed,
    )
    device = learner.compute.device
    return MonoSource(learner.agent, learner.weights, device, config)


def _ray(
    scheme: Scheme, learner: Learner[Any], precision: Precision, ending: ExitStack
) -> EndingSource:
    """Returns the source of actors of Ray."""
    from torchbeast.learner.fleets import collecting_fleet
    from torchbeast.schemes.ray_source import RaySource, RaySourceConfig

    spec = env_spec(scheme)
    fleet = ending.enter_context(collecting_fleet(scheme, spec))
    config = RaySourceConfig(
        env=spec,
        actor=learner.agent.spec,
        precision=precision,
        fleet=scheme.ray,
        num_workers=scheme.col_remote_workers,
        rollouts=learner.rollouts,
        extras=learner.extras,
        mode=learner.mode,
        num_batches=1 + learner.batches_at_once,
        spare_columns=learner.spare_columns,
        seed=learner.seed,
    )
    device = learner.compute.device
    return RaySource(learner.agent, learner.weights, device, fleet, config)
