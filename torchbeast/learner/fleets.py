# SPDX-License-Identifier: Apache-2.0
"""Makes the fleets of a scheme's workers: processes of this machine, or actors of Ray.

Ray is the caller's, if it is initialised; else the cluster of $RAY_ADDRESS; else one that is
started for the run. In a gradient worker on Ray it is the cluster of that worker.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager

from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.system import environment_of_share
from torchbeast.schemes.config import RayConfig
from torchbeast.schemes.gradients.config import GradientConfig
from torchbeast.schemes.gradients.workers import WORKER
from torchbeast.schemes.ray_fleet import RayFleet, User, gradient_actors
from torchbeast.schemes.room import Group, check_room
from torchbeast.schemes.scheme import Scheme
from torchbeast.sources.processes.fleet import Fleet, LocalFleet

_USER = User(
    "Learner",
    "The last checkpoint of the run is kept, if there was one; a Learner with the same log_dir "
    "resumes it.",
)


def collecting_fleet(scheme: Scheme, spec: EnvSpec) -> RayFleet:
    """Returns the fleet of the actors that collect; spec: of their environments."""
    fleet = RayFleet(scheme.ray, _name(), spec.is_factory, _USER)
    return _with_room(fleet, scheme)


def gradient_fleet(
    scheme: Scheme, gradients: GradientConfig, spec: EnvSpec
) -> AbstractContextManager[Fleet]:
    """Returns the fleet of the gradient workers."""
    if scheme.grad_backend == "processes":
        return LocalFleet(WORKER, environment_of_share(gradients.cores))
    actors = gradient_actors(scheme.grad_cpus, gradients.gpus)
    fleet = RayFleet(RayConfig(), _name(), spec.is_factory, _USER, actors)
    return _with_room(fleet, scheme)


def _with_room(fleet: RayFleet, scheme: Scheme) -> RayFleet:
    """Returns the fleet; raises UsageError, and ends it, if the workers find no room."""
    try:
        check_room(fleet.room(), _groups(scheme))
    except BaseException:
        fleet.end()
        raise
    return fleet


def _groups(scheme: Scheme) -> list[Group]:
    """Returns all workers of the scheme that are actors of Ray."""
    groups = []
    if scheme.grad_backend == "ray":
        gpus = scheme.grad_worker_resources.get("num_gpus", 0.0)
        count = scheme.grad_remote_workers
        groups.append(Group("gradient workers", count, scheme.grad_cpus, gpus))
    if scheme.col_backend == "ray":
        count = scheme.col_remote_workers * max(1, scheme.grad_remote_workers)
        groups.append(Group("workers that collect", count, scheme.col_cpus))
    return groups


def _name() -> str:
    """Returns a name that begins those of a fleet's actors, of which no two on a cluster are the
    same.
    """
    return f"learner-{secrets.token_hex(4)}"
