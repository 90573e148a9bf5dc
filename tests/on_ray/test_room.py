# SPDX-License-Identifier: Apache-2.0
"""A run that has no room on its cluster is told at once what the cluster has."""

from __future__ import annotations

import pytest

from torchbeast.errors import UsageError
from torchbeast.on_ray.config import (
    Node,
    RayConfig,
    Room,
    WorkerGroup,
    check_object_store,
    check_room,
    num_workers,
)

MEGABYTE = 10**6


def node(
    cpus: float, gpus: float = 0, host: str = "10.0.0.1", is_learners: bool = False, store: int = 0
) -> Node:
    return Node(host, cpus, gpus, is_learners, store)


def room(*nodes: Node, free: float | None = None) -> Room:
    return Room(nodes, sum(each.cpus for each in nodes) if free is None else free)


def config(**settings: object) -> RayConfig:
    return RayConfig(**{"num_envs": 64, **settings})  # type: ignore[arg-type]


TWO = room(node(2.0, is_learners=True), node(3.0, host="10.0.0.2"))


@pytest.mark.parametrize(
    ("settings", "where", "expected"),
    [
        ({}, TWO, 5),
        ({"num_envs": 3}, TWO, 3),
        ({"num_envs": None}, TWO, 5),
        ({"num_envs": None, "num_buffers": 4}, TWO, 4),
        ({"actor_cpus": 2}, TWO, 2),  # a CPU of the second node is of no use
        ({"actor_cpus": 0.5}, TWO, 10),
        ({"learner_cpus": 1}, TWO, 4),
        ({"num_workers": 4}, TWO, 4),
        ({}, room(node(8.0), free=3.5), 3),  # others use the rest
        ({}, room(node(8.0), free=0.0), 1),  # which waits until they end
        ({"num_workers": 8}, room(node(8.0), free=0.0), 8),
        ({"num_workers": 9, "min_workers": 2}, TWO, 9),
    ],
)
def test_a_cluster_gets_as_many_workers_as_fit_its_nodes(
    settings: dict[str, object], where: Room, expected: int
) -> None:
    assert num_workers(config(**settings), where) == expected


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"num_workers": 6}, TWO, ["6 Ray actors", "2 nodes with 5 CPUs", "10.0.0.2: 3 CPUs"]),
        ({"num_workers": 6}, TWO, ["use num_workers 5, or fewer CPUs"]),
        ({"num_workers": 6, "address": "auto"}, TWO, ["min_workers, so that the others start"]),
        ({"num_workers": 9, "min_workers": 6}, TWO, ["6 Ray actors"]),
        ({"num_workers": 5, "learner_cpus": 1}, TWO, ["and learner_cpus 1", "workers 4"]),
        ({"actor_cpus": 4}, TWO, ["1 Ray actor with actor_cpus 4", "fewer CPUs"]),
    ],
)
def test_too_little_room_is_a_sentence_that_says_what_there_is(
    settings: dict[str, object], where: Room, words: list[str]
) -> None:
    with pytest.raises(UsageError) as error:
        num_workers(config(**settings), where)
    for word in words:
        assert word in str(error.value)


def test_many_nodes_are_not_all_named() -> None:
    many = room(*[node(1.0, host=f"10.0.0.{i}") for i in range(100)])
    assert "100 nodes with 100 CPUs" in str(many)
    assert "10.0.0.7: 1 CPU, ..." in str(many) and "10.0.0.8" not in str(many)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_workers": 65}, "num_workers is 65, but there are only 64 environments"),
        ({"min_workers": 1}, "min_workers 1 is more than num_workers None"),
        ({"num_workers": 2, "min_workers": 3}, "use at least as many num_workers"),
        ({"actor_cpus": 0.0}, "actor_cpus must be greater than 0, got 0.0"),
        ({"learner_gpus": -1.0}, "learner_gpus must be at least 0"),
        ({"address": "ray://head:10001", "learner_gpus": 1.0}, "submit the run as a job"),
    ],
)
def test_impossible_settings_are_told(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(**settings)


def test_rollouts_that_the_object_store_cannot_hold_are_refused_with_the_figures() -> None:
    where = room(node(2.0, is_learners=True, store=100 * MEGABYTE), node(2.0, store=MEGABYTE))
    check_object_store(where, MEGABYTE, rollouts=60, weights_bytes=10 * MEGABYTE)
    with pytest.raises(UsageError) as error:
        check_object_store(where, MEGABYTE, rollouts=61, weights_bytes=10 * MEGABYTE)
    for words in ("61 rollouts of 1.0 MB", "need 101.0 MB", "is 100.0 MB", "num_buffers"):
        assert words in str(error.value)


def test_a_learner_outside_the_cluster_has_no_store_to_fill() -> None:
    check_object_store(room(node(2.0, store=1)), MEGABYTE, rollouts=100, weights_bytes=1)


LARGE, SMALL = WorkerGroup("learners", 2, 2.0, 0.5), WorkerGroup("players", 4, 0.5)
WITH_GPU = room(node(3.0, gpus=1), node(3.0, host="10.0.0.2"))


def test_workers_of_several_kinds_have_room_beside_each_other() -> None:
    check_room(room(node(6.0, gpus=1)), [SMALL, LARGE])
    check_room(room(node(4.0, gpus=1), node(2.0)), [SMALL, LARGE])
    check_room(room(node(0.3)), [WorkerGroup("players", 3, 0.1)])


@pytest.mark.parametrize("where", [WITH_GPU, room(node(5.5, gpus=1)), room(node(6.0, gpus=0.5))])
def test_workers_that_have_room_only_one_kind_at_a_time_are_refused(where: Room) -> None:
    """A learner that waits for its players would hold the room that they wait for."""
    sentence = (
        r"^4 players with 0.5 CPUs each beside 2 learners with 2 CPUs and 0.5 GPUs each do not "
        r"fit on \d node.*: use fewer workers, reserve less for each, or add nodes$"
    )
    with pytest.raises(UsageError, match=sentence):
        check_room(where, [SMALL, LARGE])
