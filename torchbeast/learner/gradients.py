# SPDX-License-Identifier: Apache-2.0
"""Makes the workers of a scheme: gradient workers, in each a learner that collects for itself,
and actors of Ray that collect.

Ray is the caller's, if it is initialised; else the cluster of $RAY_ADDRESS; else one that is
started for the run. In a gradient worker on Ray it is the cluster of that worker.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing

import torch

from torchbeast.core.update.ranks import Ranks
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.fleet import Fleet, LocalFleet
from torchbeast.fleets.system import environment_of_share, keep_freed_memory
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.worker import WorkerParts
from torchbeast.gradients.workers import WORKER, GradientWorkers, gradient_workers
from torchbeast.on_ray.config import RayConfig, WorkerGroup, check_room
from torchbeast.on_ray.fleet import Actors, RayFleet, User, gradient_actors
from torchbeast.run.assemble import Assembled, assemble
from torchbeast.run.config import HardwareConfig
from torchbeast.run.plan import Plan
from torchbeast.schemes.scheme import Scheme
from torchbeast.seeds import seed_of

_USER = User(
    "Learner",
    "The last checkpoint of the run is kept, if there was one; a Learner with the same log_dir "
    "resumes it.",
)


def workers_of(
    config: GradientConfig,
    make_fleet: Callable[[], AbstractContextManager[Fleet]],
    plan: Plan,
    made: Assembled,
    seed: int,
    ending: ExitStack,
) -> GradientWorkers:
    """Returns the gradient workers of a run, each with a learner as the plan says.

    made: the learner of this process, whose network all have. seed: of the environments and actions
    of all workers. `ending` ends them.
    """
    hardware = HardwareConfig(
        num_learner_threads=1, torch_threads=config.cores, disable_cuda=not config.gpus
    )
    learner = dataclasses.replace(plan.learner, actor=made.agent.spec, hardware=hardware)
    sent = dataclasses.replace(plan, learner=learner, gradients=None, loggers=(), callbacks=())
    make = functools.partial(make_worker, sent, seed)
    fleet = ending.enter_context(make_fleet())
    workers = gradient_workers(make, config, made.optimiser_step, fleet)
    return ending.enter_context(closing(workers))


def make_worker(
    plan: Plan, seed: int, index: int, ranks: Ranks | None, stops_early: Callable[[float], bool]
) -> WorkerParts:
    """Makes the parts of a gradient worker, in its process."""
    own, ending = seed_of(seed, "gradient worker", index), ExitStack()
    torch.manual_seed(seed_of(own, "actions"))
    actor, weights = plan.learner.actor, plan.collection.weights
    made = assemble(plan.learner, lambda _: plan.make_agent(actor), weights, ranks=ranks)
    keep_freed_memory(made.compute.device.type)
    learner = made.learner_info(plan.learner, own, stops_early=stops_early)
    return WorkerParts(
        source=plan.collection.source(learner, plan.env, ending),
        optimiser_step=made.optimiser_step,
        publish=made.weights.publish,
        end=ending.close,
        device=made.compute.device,
    )


def gradient_fleet(
    scheme: Scheme, gradients: GradientConfig, spec: EnvSpec
) -> AbstractContextManager[Fleet]:
    """Returns the fleet of the gradient workers; spec: of their environments."""
    if scheme.grad_backend == "processes":
        return LocalFleet(WORKER, environment_of_share(gradients.cores))
    actors = gradient_actors(scheme.grad_cpus, gradients.gpus)
    return ray_fleet(scheme, spec, RayConfig(), actors)


def ray_fleet(
    scheme: Scheme, spec: EnvSpec, config: RayConfig, actors: Actors | None = None
) -> RayFleet:
    """Returns a fleet of Ray actors, by default of those that collect.

    Raises UsageError if the workers of the scheme find no room.
    """
    name = f"learner-{secrets.token_hex(4)}"  # no two fleets on a cluster have the same
    fleet = RayFleet(config, name, spec.is_factory, _USER, actors)
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
        groups.append(WorkerGroup("workers that collect", count, scheme.col_cpus))
    return groups
