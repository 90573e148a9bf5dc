# SPDX-License-Identifier: Apache-2.0
"""Settings of a run on Ray, and whether it has room on a cluster: how many workers it gets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchbeast.collect.config import BufferedActorsConfig
from torchbeast.core.base.checks import above, at_least, require, setting
from torchbeast.errors import UsageError

CLIENT = "ray://"  # prefix of the address of a cluster from outside
_OF_PACKAGES = re.compile(r"(?<![\w.])(envpool|pettingzoo|pybullet_envs_gymnasium):")


def is_own_code(*names: object) -> bool:
    """Returns whether nodes must import a module of the user, for one of these names of
    environments, networks, algorithms and functions.
    """
    return any(":" in _OF_PACKAGES.sub("", str(name)) for name in names)


@dataclass(frozen=True, kw_only=True)
class RayConfig(BufferedActorsConfig):
    """The environments, and the Ray actors that step them on this machine or on a cluster."""

    address: str | None = setting(None, "connection")
    """Ray cluster to run on: auto (the cluster to which this machine belongs), HOST:PORT of its
    head node, or ray://HOST:10001 from outside. Default: $RAY_ADDRESS if set, else start Ray on
    this machine for this run."""
    num_workers: int | None = None
    """Ray actors, among which the environments are divided; each has a copy of the network.
    Default: all that fit on the cluster, at most one per environment."""
    min_workers: int | None = setting(None, bounds=(at_least, 1))
    """Ray actors that Ray must schedule at startup. The others start when the cluster has room for
    them, after nodes join or other jobs end. Default: --num_workers."""
    actor_cpus: float = setting(1.0, bounds=(above, 0))
    """CPUs that Ray reserves for each Ray actor. An actor uses one."""
    learner_cpus: float = setting(0.0, bounds=(at_least, 0))
    """CPUs of this machine that Ray keeps free for the learner."""
    learner_gpus: float = setting(0.0, bounds=(at_least, 0))
    """GPUs of this machine that Ray keeps free for the learner. With 0 the learner still uses a GPU
    if it sees one, even if Ray assigns that GPU to others."""
    working_dir: str | None = setting(None, "connection")
    """Folder with your code, which Ray copies to the machines of the cluster. Default: the current
    folder if the environment or the network is your own (module:attribute), else none."""
    dashboard: bool = setting(False, "connection")
    """Start Ray's dashboard if this run starts Ray. Needs pip install 'ray[default]'. It asks for
    the token in torchbeast-ray-*/token, in $TMPDIR or /tmp."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_workers is None or self.min_workers <= (self.num_workers or 0),
            f"min_workers {self.min_workers} is more than num_workers {self.num_workers}: use at "
            "least as many num_workers",
        )
        require(
            not (self.address or "").startswith(CLIENT) or not self.reserves_for_learner,
            f"with {CLIENT} the learner runs outside the cluster, which cannot reserve resources "
            "for it: remove learner_cpus and learner_gpus, or submit the run as a job",
        )

    @property
    def reserves_for_learner(self) -> bool:
        """Whether Ray keeps anything free for the learner."""
        return self.learner_cpus > 0 or self.learner_gpus > 0


class Node(NamedTuple):
    """The resources of one machine of a cluster, in use or not."""

    host: str
    cpus: float
    gpus: float
    is_learners: bool  # whether the learner runs here
    object_store_bytes: float


class Room(NamedTuple):
    """The resources of a cluster."""

    nodes: Sequence[Node]
    free_cpus: float  # of all nodes

    def __str__(self) -> str:
        each = [f"{node.host}: {_resources(node.cpus, node.gpus)}" for node in self.nodes]
        shown = ", ".join(each[:_SHOWN]) + (", ..." if len(each) > _SHOWN else "")
        cpus = sum(node.cpus for node in self.nodes)
        return (
            f"{_count(len(self.nodes), 'node')} with {_count(cpus, 'CPU')}, "
            f"{self.free_cpus:g} of them free ({shown})"
        )


_SHOWN = 8  # nodes that a message lists, at most


def num_workers(config: RayConfig, room: Room) -> int:
    """Returns the number of workers; raises UsageError if too few of them have room."""
    fitting = sum(_fitting(config, node) for node in room.nodes)
    wanted = config.num_workers or 1
    least = config.min_workers or wanted
    if fitting < least:
        raise UsageError(
            f"{_count(least, 'Ray actor')} with actor_cpus {config.actor_cpus:g} and learner_cpus "
            f"{config.learner_cpus:g} do not fit on {room}: use num_workers {fitting}, or fewer "
            "CPUs for each, or on a cluster min_workers, so that the others start when nodes join"
        )
    if config.num_workers is not None:
        return config.num_workers
    most = config.num_envs or config.num_buffers or fitting
    free = (room.free_cpus - config.learner_cpus) / config.actor_cpus
    return max(1, min(most, fitting, math.floor(free + 1e-9)))


class WorkerGroup(NamedTuple):
    """Workers of one kind.

    name: for the message. cpus, gpus: that Ray reserves for each.
    """

    name: str
    number: int
    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        return f"{self.number} {self.name} with {_resources(self.cpus, self.gpus)} each"


def check_room(room: Room, groups: Sequence[WorkerGroup]) -> None:
    """Raises UsageError unless the cluster, if otherwise unused, has room for all these workers.

    It places them one after the other, the largest first, where there is room.
    """
    left = [(node.cpus, node.gpus) for node in room.nodes]
    for group in sorted(groups, key=lambda group: (group.gpus, group.cpus), reverse=True):
        for _ in range(group.number):
            if not _takes_place(group, left):
                wanted = " beside ".join(map(str, groups))
                raise UsageError(
                    f"{wanted} do not fit on {room}: use fewer workers, reserve less for each, or "
                    "add nodes"
                )


def _takes_place(group: WorkerGroup, left: list[tuple[float, float]]) -> bool:
    """Takes CPUs and GPUs for one worker from those left; False if no node has enough."""
    for index, (cpus, gpus) in enumerate(left):
        if cpus + 1e-9 >= group.cpus and gpus + 1e-9 >= group.gpus:
            left[index] = cpus - group.cpus, gpus - group.gpus
            return True
    return False


def check_object_store(room: Room, rollout_bytes: int, rollouts: int, weights_bytes: int) -> None:
    """Raises UsageError if the rollouts and weights of a run do not fit into the object store on
    the learner's node.

    rollout_bytes: of one environment. rollouts: largest number that may wait for the learner, each
    of one environment. weights_bytes: of one version.
    """
    needed = rollouts * rollout_bytes + _VERSIONS * weights_bytes
    here = next((node for node in room.nodes if node.is_learners), None)
    if here is None or needed <= here.object_store_bytes:  # None: outside the cluster
        return
    raise UsageError(
        f"{rollouts} rollouts of {_megabytes(rollout_bytes)} and {_VERSIONS} versions of weights "
        f"of {_megabytes(weights_bytes)} need {_megabytes(needed)}, but the capacity of Ray's "
        f"object store on this machine is {_megabytes(here.object_store_bytes)}: use fewer "
        "num_buffers or num_envs, a smaller unroll_length, or start Ray with a larger "
        "--object-store-memory"
    )


_VERSIONS = 4  # of the weights: the newest, one in use until a step ends, two in transfer


def _fitting(config: RayConfig, node: Node) -> int:
    """Returns the number of workers for which an otherwise unused node has room."""
    cpus = node.cpus - (config.learner_cpus if node.is_learners else 0)
    return math.floor(cpus / config.actor_cpus + 1e-9)


def _resources(cpus: float, gpus: float) -> str:
    return _count(cpus, "CPU") + (f" and {_count(gpus, 'GPU')}" if gpus else "")


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
