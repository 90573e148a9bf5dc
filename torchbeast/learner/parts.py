# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of a run from a scheme: its settings, which a program with the same flags would
have, the agent, the weights that act, and the source.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchbeast.collect.contract import LearnerInfo, Source
from torchbeast.collect.weights import PublishedWeights, SharedWeights, ring_size
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.config import recorded
from torchbeast.core.algos.registry import name_of
from torchbeast.core.base.checks import names_with
from torchbeast.core.base.specs import ActorSpec, ModelConfig
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.envs import spec_of
from torchbeast.envs.spec import EnvSpec
from torchbeast.reporting.diagnosis import RunFacts
from torchbeast.reporting.log_files import Logger
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.assemble import (
    CPU_BYTES_AT_ONCE,
    LearnerConfig,
    MakeAgent,
    MakeWeights,
    precision,
)
from torchbeast.run.config import CheckpointConfig, HardwareConfig, TrainingConfig
from torchbeast.run.learner_run import RunSettings
from torchbeast.schemes.scheme import Scheme

if TYPE_CHECKING:  # only schemes with workers on Ray import it
    from torchbeast.on_ray.config import RayConfig, WorkerGroup
    from torchbeast.on_ray.fleet import Actors, RayFleet


def run_settings(
    scheme: Scheme, env: EnvSpec, run: RunConfig, total_steps: int, loggers: Sequence[Logger]
) -> RunSettings:
    """Returns the settings of a run of total_steps."""
    learner = _learner_config(scheme, env, total_steps)
    return RunSettings(
        run=run,
        checkpoints=CheckpointConfig(),
        display=DisplayConfig(),
        learner=learner,
        facts=RunFacts(
            program="polybeast" if scheme.inference == "central" else "monobeast",
            num_envs=scheme.num_envs,
            processes=max(1, scheme.col_remote_workers),
            fixed_lag=0 if scheme.is_synchronous else None,
        ),
        recorded=_recorded(scheme, run, learner),
        of_command=names_with("command", run),
        loggers=loggers,
        becomes_latest=False,  # its folder is the user's, who may keep other things there
    )


def _learner_config(scheme: Scheme, env: EnvSpec, total_steps: int) -> LearnerConfig:
    algo = scheme.algo
    return LearnerConfig(
        actor=scheme.actor_factory.spec,
        algo=algo.algo,
        algorithm=algo.config,
        step=algo.step,
        total_steps=total_steps,
        rollouts=scheme.rollouts,
        hardware=_hardware(scheme),
        replay=scheme.replay,
        transitions=scheme.transitions,
        synchronous_rollouts=scheme.synchronous_rollouts,
        reproducible=scheme.col_remote_workers > 0 and scheme.is_synchronous,
    ).in_environment(env.name)


def _hardware(scheme: Scheme) -> HardwareConfig:
    """Returns the use of this machine. The thread that calls `step` is the only one that learns;
    several would mostly wait for each other in operations on a batch of a single slice.
    """
    rows = 2 if scheme.learns_from_transitions else scheme.rollouts.unroll_length + 1
    size = num_bytes(scheme.train_envs_factory.observation_space) * rows
    return HardwareConfig(
        num_learner_threads=1,
        torch_threads=1 if scheme.rollouts.batch_size * size <= CPU_BYTES_AT_ONCE else None,
        device=scheme.local_device or "auto",
    )


def _recorded(scheme: Scheme, run: RunConfig, learner: LearnerConfig) -> dict[str, Any]:
    """Returns the settings by the names of a program's flags."""
    network = learner.actor
    parts = [
        run,
        learner.algorithm,
        learner.step,
        learner.rollouts,
        learner.hardware,
        learner.replay,
        learner.transitions,
        TrainingConfig(total_steps=learner.total_steps),
        ModelConfig(
            model=network.name, model_kwargs=dict(network.kwargs), use_lstm=network.use_lstm
        ),
        scheme.collecting,
    ]
    flags = {name: value for part in parts for name, value in recorded(part).items()}
    return {**flags, "algo": name_of(learner.algo)}


def env_spec(scheme: Scheme) -> EnvSpec:
    """Returns the spec of the environments; raises SpecError where workers cannot be sent it."""
    envs = scheme.train_envs_factory
    spec = spec_of(envs.env_fn, envs.env_kwargs, is_sent=scheme.col_remote_workers > 0)
    keywords = envs.info_keywords or spec.options.info_keywords
    options = dataclasses.replace(spec.options, info_keywords=keywords)
    return dataclasses.replace(spec, options=options)


def making_agent(scheme: Scheme) -> MakeAgent:
    """Returns a function that makes the agent of the scheme for a spec of its network."""
    envs = scheme.train_envs_factory

    def make(spec: ActorSpec) -> Agent:
        agent = make_agent(spec, envs.single_frame_space, envs.action_space, envs.frame_stack)
        scheme.actor_factory.restart(agent.model)
        return agent

    return make


def making_weights(scheme: Scheme) -> MakeWeights:
    """Returns a function that publishes the first weights."""
    if scheme.col_remote_workers and scheme.inference == "worker":
        return functools.partial(SharedWeights, size=ring_size(scheme.processes.fixed_lag))
    return PublishedWeights


def make_source(
    scheme: Scheme,
    learner: LearnerInfo[Any],
    config: LearnerConfig,
    ending: ExitStack,
    stops_early: Callable[[float], bool] | None = None,
) -> Source:
    """Returns the source; `ending` closes its environments or ends its workers.

    config: of the run's learner. stops_early: of a gradient worker, see LocalSource, which alone
    asks for it.
    """
    env, on_demand = env_spec(scheme), scheme.synchronous_rollouts > 0
    if stops_early is not None:  # whose versions skip numbers, and where batches may be dropped
        on_demand = scheme.is_synchronous
    acting = precision(config.hardware, config.reproducible)
    if scheme.inference == "central":
        from torchbeast.learner.served import served_source  # compiled

        served = served_source(scheme, env, learner, ending)
        ending.callback(served.end)
        return served
    if scheme.col_backend == "ray":
        from torchbeast.collect.source import FleetSource

        fleet = ending.enter_context(ray_fleet(scheme, env, scheme.ray))
        workers, lag = scheme.col_remote_workers, scheme.processes.fixed_lag
        return FleetSource(learner, env, acting, fleet, scheme.ray, workers, lag, on_demand)
    if scheme.col_remote_workers:
        from torchbeast.collect.source import process_source

        return process_source(learner, env, acting, scheme.processes, on_demand, ending)
    from torchbeast.collect.local import LocalSource

    keywords, make = env.options.info_keywords, scheme.train_envs_factory.make
    source = LocalSource(learner, keywords, acting, make, scheme.num_envs, stops_early)
    ending.callback(source.end)
    return source


def ray_fleet(
    scheme: Scheme, spec: EnvSpec, config: RayConfig, actors: Actors | None = None
) -> RayFleet:
    """Returns a fleet of Ray actors, by default of those that collect.

    Ray is the caller's, if it is initialised; else the cluster of $RAY_ADDRESS; else one that is
    started for the run. In a gradient worker on Ray it is the cluster of that worker.

    Raises UsageError if the workers of the scheme find no room.
    """
    from torchbeast.on_ray.config import check_room
    from torchbeast.on_ray.fleet import LEARNER, RayFleet

    name = f"learner-{secrets.token_hex(4)}"  # no two fleets on a cluster have the same
    fleet = RayFleet(config, name, spec.is_factory, LEARNER, actors)
    try:
        check_room(fleet.room(), _groups(scheme))
    except BaseException:
        fleet.end()
        raise
    return fleet


def _groups(scheme: Scheme) -> list[WorkerGroup]:
    """Returns all workers of the scheme that are actors of Ray."""
    from torchbeast.on_ray.config import WorkerGroup

    groups = []
    if scheme.grad_backend == "ray":
        gpus = scheme.grad_worker_resources.get("num_gpus", 0.0)
        count = scheme.grad_remote_workers
        groups.append(WorkerGroup("gradient workers", count, scheme.grad_cpus, gpus))
    if scheme.col_backend == "ray":
        count = scheme.col_remote_workers * max(1, scheme.grad_remote_workers)
        groups.append(WorkerGroup("workers that collect", count, scheme.col_cpus))
    return groups
