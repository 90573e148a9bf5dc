# SPDX-License-Identifier: Apache-2.0
"""Starts the source of a fleet of workers for the duration of a `with` block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from compliance.source import Running, Setup

from torchbeast.collect.config import ProcessesConfig
from torchbeast.collect.source import WORKER, FleetCollection, FleetSource
from torchbeast.collect.weights import SharedWeights, ring_size
from torchbeast.envs import EnvSpec
from torchbeast.fleets.fleet import Fleet, LocalFleet
from torchbeast.fleets.supervisor import Supervisor

SOON = 30.0


def source_of(
    setup: Setup,
    fleet: Fleet,
    *,
    num_buffers: int | None = None,
    fixed_lag: int | None = None,
    on_demand: bool = False,
    **of_learner: Any,
) -> FleetSource:
    """Returns a source; of_learner: what is not as `setup` says. By default an environment has two
    buffers.
    """
    weights = functools.partial(SharedWeights, size=ring_size(fixed_lag))
    learner = setup.learner(weights, **of_learner)
    actors = ProcessesConfig(num_envs=setup.num_envs, num_buffers=num_buffers)
    groups, env = setup.num_groups, EnvSpec(setup.env_id)
    plan = FleetCollection(
        num_envs=setup.num_envs,
        fixed_lag=fixed_lag,
        processes=groups,
        actors=actors,
        make_fleet=lambda: nullcontext(fleet),
        on_demand=on_demand,
    )
    return FleetSource(learner, env, fleet, plan)


@contextmanager
def running_on(fleet: Fleet, setup: Setup, **options: Any) -> Iterator[Running]:
    """Starts a source; options: of source_of."""
    source, supervisor = source_of(setup, fleet, **options), Supervisor()
    try:
        source.start(supervisor)
        yield Running(source, source._learner.rollouts.agent, source._weights, supervisor)
    finally:
        supervisor.stop("the test ended")
        assert supervisor.join(SOON) == []


@contextmanager
def running_mono(setup: Setup, **options: Any) -> Iterator[Running]:
    """Starts a source of processes; options: of source_of."""
    with (
        LocalFleet(WORKER, {"OMP_NUM_THREADS": "1"}) as fleet,
        running_on(fleet, setup, **options) as running,
    ):
        yield running


def pids(running: Running) -> list[int]:
    """Ids of the worker processes."""
    return [actor.worker.process.pid for actor in running.source._actors]
