# SPDX-License-Identifier: Apache-2.0
"""Decides whether a run has room on a Ray cluster, and how many workers it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchbeast.errors import UsageError
from torchbeast.on_ray.config import RayConfig


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
        each = [f"{node.host} {_count(node.cpus, 'CPU')}{_gpus(node)}" for node in self.nodes]
        shown = ", ".join(each[:_SHOWN]) + (", ..." if len(each) > _SHOWN else "")
        cpus = sum(node.cpus for node in self.nodes)
        return (
            f"{_count(len(self.nodes), 'node')} with {_count(cpus, 'CPU')}, "
            f"{self.free_cpus:g} of them free ({shown})"
        )


_SHOWN = 8  # nodes that a message lists, at most


def num_workers(config: RayConfig, room: Room) -> int:
    """Returns the number of workers; raises UsageError if too few of them have room."""
    _check_learner(config, room)
    fitting = sum(_fitting(config, node) for node in room.nodes)
    wanted = config.num_workers or 1
    least = config.min_workers or wanted
    if fitting < least:
        raise UsageError(
            f"{_count(least, 'Ray actor')} with actor_cpus {config.actor_cpus:g} and learner_cpus "
            f"{config.learner_cpus:g} find no room on {room}: give num_workers {fitting}, or fewer "
            "CPUs for each, or on a cluster min_workers to let the others wait for nodes that join"
        )
    if config.num_workers is not None:
        return config.num_workers
    most = config.num_actors or config.num_buffers or fitting
    return max(1, min(most, fitting, math.floor(_free_cpus(config, room))))


class WorkerGroup(NamedTuple):
    """Workers of one kind.

    name: for the message. cpus, gpus: that Ray reserves for each.
    """

    name: str
    number: int
    cpus: float
    gpus: float = 0.0

    def __str__(self) -> str:
        needs = _count(self.cpus, "CPU") + (f" and {_count(self.gpus, 'GPU')}" * bool(self.gpus))
        return f"{self.number} {self.name} with {needs} each"


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
                    f"{wanted} have no room on {room}: use fewer workers, reserve less for each, "
                    "or add nodes"
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
    stores = [node.object_store_bytes for node in room.nodes if node.is_learners]
    if not stores or needed <= stores[0]:
        return
    raise UsageError(
        f"{rollouts} rollouts of {_megabytes(rollout_bytes)} and {_VERSIONS} versions of weights "
        f"of {_megabytes(weights_bytes)} need {_megabytes(needed)}, but Ray's object store on this "
        f"machine holds {_megabytes(stores[0])}: give fewer --num_buffers or --num_actors, a "
        "smaller --unroll_length, or start Ray with a larger --object-store-memory"
    )


_VERSIONS = 4  # of the weights: the newest, one in use until a step ends, two in transfer


def _check_learner(config: RayConfig, room: Room) -> None:
    if not config.reserves_for_learner:
        return
    for node in room.nodes:
        if node.is_learners:
            if node.cpus >= config.learner_cpus and node.gpus >= config.learner_gpus:
                return
            raise UsageError(
                f"--learner_cpus {config.learner_cpus:g} and --learner_gpus "
                f"{config.learner_gpus:g} are more than Ray has on this machine: "
                f"{_count(node.cpus, 'CPU')}, {_count(node.gpus, 'GPU')}; give fewer, or leave "
                "them out"
            )
    raise UsageError(
        "--learner_cpus and --learner_gpus are kept free on the machine of the learner, but this "
        f"machine is not a node of the cluster, which has {room}"
    )


def _fitting(config: RayConfig, node: Node) -> int:
    """Returns the number of workers for which an otherwise unused node has room."""
    cpus = node.cpus - (config.learner_cpus if node.is_learners else 0)
    return math.floor(cpus / config.actor_cpus + 1e-9)


def _free_cpus(config: RayConfig, room: Room) -> float:
    return (room.free_cpus - config.learner_cpus) / config.actor_cpus + 1e-9


def _gpus(node: Node) -> str:
    return f" and {_count(node.gpus, 'GPU')}" if node.gpus else ""


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
