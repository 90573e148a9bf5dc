# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of a run from a scheme, as a program with the same flags would make it, and the
gradient workers of the run, in each of which a learner collects for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch

from torchbeast.collect.contract import CollectionPlan
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import ActorFactory, make_agent
from torchbeast.core.algos.config import recorded
from torchbeast.core.algos.registry import name_of
from torchbeast.core.base.checks import names_with
from torchbeast.core.base.specs import ActorSpec, ModelConfig
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.update.ranks import Ranks
from torchbeast.envs import spec_of
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.fleet import LocalFleet
from torchbeast.fleets.system import environment_of_share, keep_freed_memory
from torchbeast.gradients.config import GradientConfig
from torchbeast.on_ray.config import RayConfig, WorkerGroup, check_room, is_own_code
from torchbeast.reporting.loggers import Logger
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.assemble import CPU_BYTES_AT_ONCE, Assembled, LearnerConfig, assemble
from torchbeast.run.config import HardwareConfig, TrainingConfig
from torchbeast.run.plan import Plan
from torchbeast.schemes.scheme import Scheme
from torchbeast.seeds import seed_of

if TYPE_CHECKING:  # only schemes with gradient workers, and with workers on Ray, import them
    from torchbeast.gradients.worker import WorkerParts
    from torchbeast.gradients.workers import GradientWorkers
    from torchbeast.on_ray.fleet import Actors, RayFleet


def plan_of(scheme: Scheme, run: RunConfig, total_steps: int, loggers: Sequence[Logger]) -> Plan:
    """Returns the plan of a run of total_steps.

    Raises SpecError if the environments cannot be sent to the workers.
    """
    env, envs = _env_spec(scheme), scheme.train_envs_factory
    learner, workers = _learner_config(scheme, env, total_steps), scheme.gradients
    return Plan(
        program="polybeast" if scheme.inference == "central" else "monobeast",
        run=run,
        recorded=_recorded(scheme, run, learner),
        learner=learner,
        make_agent=functools.partial(_agent, envs, scheme.actor_factory),
        gradients=functools.partial(_gradient_workers, scheme, workers) if workers else None,
        env=env,
        observation_space=envs.single_frame_space,
        make_envs=envs.make,
        collection=_collection(scheme, env),
        loggers=loggers,
        of_command=names_with("command", run),
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
    network, length = learner.actor, TrainingConfig(total_steps=learner.total_steps)
    kwargs = dict(network.kwargs)
    model = ModelConfig(model=network.name, model_kwargs=kwargs, use_lstm=network.use_lstm)
    parts = [run, scheme.collecting, model, length, learner.algorithm, learner.step]
    parts += [learner.rollouts, learner.replay, learner.transitions, learner.hardware]
    flags = {name: value for part in parts for name, value in recorded(part).items()}
    return {**flags, "algo": name_of(learner.algo)}


def _env_spec(scheme: Scheme) -> EnvSpec:
    """Returns the spec of the environments; raises SpecError if workers cannot be sent it."""
    envs = scheme.train_envs_factory
    spec = spec_of(envs.env_fn, envs.env_kwargs, is_sent=scheme.col_remote_workers > 0)
    keywords = envs.info_keywords or spec.options.info_keywords
    return spec.with_options(info_keywords=keywords)


def _agent(envs: VecEnvFactory, factory: ActorFactory, spec: ActorSpec) -> Agent:
    agent = make_agent(spec, envs.single_frame_space, envs.action_space, envs.frame_stack)
    factory.restart(agent.model)
    return agent


def _collection(scheme: Scheme, env: EnvSpec) -> CollectionPlan:
    """Returns how the learner collects, or else each of the gradient workers."""
    envs, workers = scheme.train_envs_factory, scheme.col_remote_workers
    actors: Any = scheme.collecting
    on_demand = scheme.synchronous_rollouts > 0
    if scheme.gradients is not None:  # whose versions skip numbers, and may drop batches
        on_demand = scheme.is_synchronous
    facts: dict[str, Any] = {
        "num_envs": scheme.num_envs,
        "processes": max(1, workers),
        "fixed_lag": scheme.fixed_lag,
    }
    if scheme.inference == "central":
        from torchbeast.servers.source import StartedServers  # compiled

        return StartedServers(**facts, config=actors)
    if not workers:
        from torchbeast.collect.local import LocalCollection

        return LocalCollection(**facts, make_env=envs.make)
    from torchbeast.collect.source import FleetCollection, local_fleet

    make_fleet: Any = local_fleet
    if scheme.col_backend == "ray":
        actors, make_fleet = scheme.ray, functools.partial(_ray_fleet, scheme, env, scheme.ray)
    return FleetCollection(**facts, actors=actors, make_fleet=make_fleet, on_demand=on_demand)


def _gradient_workers(
    scheme: Scheme,
    config: GradientConfig,
    plan: Plan,
    made: Assembled,
    seed: int,
    ending: ExitStack,
) -> GradientWorkers:
    """Returns the gradient workers of a run, each with a learner as the plan says.

    made: the learner of this process, whose network all have. seed: of the environments and actions
    of all workers. `ending` ends them.
    """
    from torchbeast.gradients.workers import WORKER, gradient_workers

    fleet: LocalFleet | RayFleet
    if scheme.grad_backend == "processes":
        fleet = LocalFleet(WORKER, environment_of_share(config.cores))
    else:
        from torchbeast.on_ray.fleet import Actors

        actors = Actors(WORKER, {"num_cpus": scheme.grad_cpus, "num_gpus": config.gpus})
        fleet = _ray_fleet(scheme, plan.env, RayConfig(), actors)
    ending.enter_context(fleet)
    hardware = HardwareConfig(
        num_learner_threads=1, torch_threads=config.cores, disable_cuda=not config.gpus
    )
    learner = dataclasses.replace(plan.learner, actor=made.agent.spec, hardware=hardware)
    factory = dataclasses.replace(scheme.actor_factory, restart_model=None)  # weights are sent
    making = functools.partial(_agent, scheme.train_envs_factory, factory)
    parts: dict[str, Any] = {"gradients": None, "loggers": (), "callbacks": ()}
    sent = dataclasses.replace(plan, learner=learner, make_agent=making, **parts)
    make = functools.partial(_make_worker, sent, seed)
    workers = gradient_workers(make, config, made.optimiser_step, fleet)
    return ending.enter_context(closing(workers))


def _make_worker(
    plan: Plan, seed: int, index: int, ranks: Ranks | None, stops_early: Callable[[float], bool]
) -> WorkerParts:
    """Makes the parts of a gradient worker, in its process."""
    from torchbeast.gradients.worker import WorkerParts

    own, ending = seed_of(seed, "gradient worker", index), ExitStack()
    torch.manual_seed(seed_of(own, "actions"))
    actor, weights = plan.learner.actor, plan.collection.weights
    made = assemble(plan.learner, lambda _: plan.make_agent(actor), weights, ranks=ranks)
    keep_freed_memory(made.compute.device.type)
    keywords = plan.env.options.info_keywords
    learner = made.learner_info(plan.learner, keywords, own, stops_early=stops_early)
    return WorkerParts(
        source=plan.collection.source(learner, plan.env, ending),
        optimiser_step=made.optimiser_step,
        publish=made.weights.publish,
        end=ending.close,
        device=made.compute.device,
    )


def _ray_fleet(
    scheme: Scheme, spec: EnvSpec, config: RayConfig, actors: Actors | None = None
) -> RayFleet:
    """Returns a fleet of Ray actors, by default of those that collect.

    Ray is the caller's, if it is initialised; else the cluster of $RAY_ADDRESS; else one that is
    started for the run. In a gradient worker on Ray it is the cluster of that worker.

    Raises UsageError if the workers of the scheme find no room.
    """
    from torchbeast.on_ray.fleet import LEARNER, RayFleet

    name = f"learner-{secrets.token_hex(4)}"  # no two fleets on a cluster have the same
    settings = recorded(scheme.algo.config).items()
    shapes = [shape for name, shape in settings if name.endswith("_schedule")]
    names = [spec.name, scheme.actor_factory.spec.name, name_of(scheme.algo_factory.algo), *shapes]
    own_code = bool(spec.pickled) or is_own_code(*names)
    fleet = RayFleet(config, name, own_code, LEARNER, actors)
    try:
        check_room(fleet.room(), _groups(scheme))
    except BaseException:
        fleet.end()
        raise
    return fleet


def _groups(scheme: Scheme) -> list[WorkerGroup]:
    """Returns all workers of the scheme that are actors of Ray."""
    groups = []
    if scheme.grad_backend == "ray":
        gpus = scheme.grad_worker_resources.get("num_gpus", 0.0)
        count = scheme.grad_remote_workers
        groups.append(WorkerGroup("gradient workers", count, scheme.grad_cpus, gpus))
    if scheme.col_backend == "ray":
        count = scheme.col_remote_workers * max(1, scheme.grad_remote_workers)
        groups.append(WorkerGroup("workers that collect", count, scheme.ray.actor_cpus))
    return groups
