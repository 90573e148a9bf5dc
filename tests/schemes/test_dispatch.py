# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher of RayBeast's source sends to workers, and does when they are lost.

The fleet here is a list of calls, which the tests answer one by one, in this thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compliance.source import Setup
from ray_running import config_of
from torch import nn

from torchbeast.core.actors.registry import Agent, make_agent
from torchbeast.errors import RunError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes import ray_source
from torchbeast.schemes.ray_source import FleetWeights, RaySource
from torchbeast.sources.processes.fleet import Place, WorkerLost
from torchbeast.sources.processes.worker import (
    ActivityReport,
    Failed,
    Packed,
    Played,
    Started,
    packed_state,
)

IDLE = ActivityReport("queueing", 0.0, {}, 0)
SETUP = Setup(env_id="source_envs:Numbered", num_envs=2, num_groups=2, batch_size=1)


@dataclass
class Call:
    """A call that the test has not answered yet."""

    then: Callable[[Any], None]
    method: str
    arguments: tuple[Any, ...]


@dataclass
class FakeWorker:
    name: str
    calls: list[Call] = field(default_factory=list)
    is_killed: bool = False

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        self.calls.append(Call(then, method, arguments))

    def kill(self) -> None:
        self.is_killed = True

    def waiting(self, method: str) -> list[tuple[Any, ...]]:
        """The arguments of the calls of a method that are not answered."""
        return [call.arguments for call in self.calls if call.method == method]

    def answer(self, method: str, result: Any, number: int = 0) -> None:
        """Answers one call of a method."""
        call = [call for call in self.calls if call.method == method][number]
        self.calls.remove(call)
        call.then(result)

    def die(self, error: Exception) -> None:
        """Answers every call with the error."""
        calls, self.calls = self.calls, []
        for call in calls:
            call.then(error)


class FakeFleet:
    own_node = "a"

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.stored: list[Any] = []
        self.left: list[str] = []  # nodes

    def worker(self, name: str) -> FakeWorker:
        self.workers.append(FakeWorker(name))
        return self.workers[-1]

    def put(self, value: Any) -> Any:
        self.stored.append(value)
        return f"reference {len(self.stored) - 1}"

    def explain(self, error: WorkerLost, place: Place | None) -> WorkerLost:
        return WorkerLost(str(error), error.has_left or (place and place.node) in self.left)


class ByHand:
    """A source whose dispatcher runs when the test says so."""

    def __init__(self, **of_fleet: Any) -> None:
        observation, action, frame_stack = SETUP.spaces()
        self.agent: Agent = make_agent(SETUP.actor(), observation, action, frame_stack)
        self.weights = FleetWeights(self.agent.model, SETUP.version)
        self.fleet = FakeFleet()
        self.supervisor = Supervisor()
        config = config_of(SETUP, **of_fleet)
        device = torch.device("cpu")
        self.source = RaySource(self.agent, self.weights, device, self.fleet, config)
        self.source._supervisor = self.source._places.supervisor = self.supervisor
        self.weights.on_publish = self.source._tell_dispatcher
        for actor in self.source._actors:
            self.source._begin(actor)

    def run(self) -> None:
        """Runs the dispatcher until it has nothing to do."""
        while True:
            try:
                event = self.source._events.get_nowait()
            except queue.Empty:
                return
            assert event is not None
            event()

    def start(self, index: int, node: str = "b", reads_weights: bool = False) -> FakeWorker:
        worker = self.fleet.workers[index]
        worker.answer("place", Place("10.0.0.1", 100 + index, node))
        worker.answer("start", Started(IDLE, reads_weights))
        self.run()
        return worker

    def learn(self) -> Any:
        """Takes a rollout as the collector does, and gives it back."""
        written = self.source._played.get_nowait()
        written.release()
        self.run()
        return written.arrays


@pytest.fixture
def run() -> ByHand:
    return ByHand()


def test_no_more_is_played_than_there_is_room_for(run: ByHand) -> None:
    worker = run.start(0)
    assert worker.waiting("play") == [(0,), (1,)], "two buffers an environment"
    worker.answer("play", Played("rollout 0", IDLE))
    run.run()
    assert worker.waiting("play") == [(1,)], "its place is taken until it is learnt"
    assert run.learn() == "rollout 0"
    assert worker.waiting("play") == [(1,), (2,)]
    assert run.fleet.workers[1].waiting("play") == [], "which has not started"


def test_rollouts_are_learnt_in_their_order_though_they_overtake_each_other(run: ByHand) -> None:
    worker = run.start(0)
    worker.answer("play", Played("rollout 1", IDLE), number=1)
    run.run()
    with pytest.raises(queue.Empty):
        run.learn()
    worker.answer("play", Played("rollout 0", IDLE))
    run.run()
    assert [run.learn(), run.learn()] == ["rollout 0", "rollout 1"]


def test_weights_are_stored_once_for_all_and_only_when_one_can_fetch_them(run: ByHand) -> None:
    assert len(run.fleet.stored) == 1, "both started with the same"
    first, second = run.start(0), run.start(1)
    for version in (8, 9, 10):
        run.weights.publish(run.agent.model, version)
    run.run()
    assert first.waiting("load") == second.waiting("load") == [(10, ["reference 1"])]
    run.weights.publish(run.agent.model, 11)
    run.run()
    assert len(run.fleet.stored) == 2, "both still fetch"
    first.answer("load", None)
    run.run()
    assert first.waiting("load") == [(11, ["reference 2"])]
    first.answer("load", None)
    second.answer("load", None)
    run.run()
    assert first.waiting("load") == [] and second.waiting("load") == [(11, ["reference 2"])]
    assert len(run.fleet.stored) == 3
    second.answer("load", None)
    run.run()
    assert first.waiting("load") == second.waiting("load") == [], "nothing is newer"
    run.weights.publish(run.agent.model, 12)
    run.run()
    assert first.waiting("load") == second.waiting("load") == [(12, ["reference 3"])]


def test_workers_that_read_weights_by_themselves_are_sent_none(run: ByHand) -> None:
    here, there = run.start(0, reads_weights=True), run.start(1)
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert here.waiting("load") == [] and there.waiting("load") == [(8, ["reference 1"])]


def test_nothing_is_stored_while_all_workers_read_weights_by_themselves(run: ByHand) -> None:
    for index in range(2):
        run.start(index, reads_weights=True)
    run.weights.publish(run.agent.model, 8)
    assert run.source._events.empty(), "the dispatcher is left alone"
    run.run()
    assert len(run.fleet.stored) == 1, "only what they started with"


def test_the_successor_of_a_worker_that_read_weights_is_sent_them_elsewhere(run: ByHand) -> None:
    run.source._places._any_works = True
    worker = run.start(0, reads_weights=True)
    run.start(1, reads_weights=True)
    worker.die(WorkerLost("its node has left", has_left=True))
    run.run()
    run.weights.publish(run.agent.model, 8)
    run.run()
    successor = run.start(2)
    assert successor.waiting("load") == [(8, ["reference 1"])]


def test_workers_are_told_where_the_learners_weights_are(run: ByHand) -> None:
    address = run.fleet.workers[0].waiting("start")[0][0]["ring"]
    assert address.node == "a" and Path(address.path).exists()


def test_weights_that_are_overwritten_while_they_are_copied_are_copied_again(
    run: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning goes on meanwhile, and fills the ring."""
    weights, model = run.weights, run.agent.model
    publish_filled(weights, model, 8)
    writes = iter([range(9, 13), range(13, 16)])  # to its place; and not as far as that

    def packed_meanwhile(state: Any) -> Packed:
        for version in next(writes):
            publish_filled(weights, model, version)
        return packed_state(state)

    monkeypatch.setattr(ray_source, "packed_state", packed_meanwhile)
    version, sent = weights.newest
    assert version == 12, "in the place of 8"
    assert filling(sent) == {12.0}
    assert next(writes, None) is None


@torch.no_grad()
def publish_filled(weights: FleetWeights, model: nn.Module, version: int) -> None:
    """Publishes weights that all equal the number of their version."""
    for parameter in model.parameters():
        parameter.fill_(version)
    weights.publish(model, version)


def filling(sent: Packed) -> set[float]:
    return {value for array in sent.values() for value in array.view(np.float32).tolist()}


def test_a_worker_that_waits_for_room_gets_newer_weights_with_its_next_rollout(
    run: ByHand,
) -> None:
    worker = run.start(0)
    for number in range(2):
        worker.answer("play", Played(f"rollout {number}", IDLE))
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert worker.waiting("load") == [] and len(run.fleet.stored) == 1
    run.weights.publish(run.agent.model, 9)
    run.learn()
    assert worker.waiting("play") == [(2,)]
    assert worker.waiting("load") == [(9, ["reference 1"])]


def test_a_lost_worker_is_replaced_and_what_it_was_playing_is_played_by_no_one(
    run: ByHand,
) -> None:
    worker = run.start(0)
    run.start(1)
    worker.answer("play", Played("rollout 0", IDLE._replace(steps=7)))
    run.run()
    worker.die(WorkerLost("the process was killed"))
    run.run()
    assert [worker.name for worker in run.fleet.workers] == ["actor 0", "actor 1", "actor 0.1"]
    assert [worker.is_killed for worker in run.fleet.workers] == [True, False, False], (
        "it may be out of reach only, and would keep its cores"
    )
    status = run.source.status()
    assert status["replaced_actors"] == 1 and status["live_actors"] == 1
    assert status["collected_steps"] == 7
    successor = run.start(2)
    assert successor.waiting("play") == [(3,)], "rollout 0 still waits; 2 is left out"
    assert run.learn() == "rollout 0"
    assert successor.waiting("play") == [(3,), (4,)]
    assert run.supervisor.failure is None


def test_every_worker_gets_seeds_of_its_own(run: ByHand) -> None:
    def seed(worker: FakeWorker) -> int:
        return worker.waiting("start")[0][0]["seed"]

    first, second = map(seed, run.fleet.workers)
    run.source._places._any_works = True
    run.fleet.workers[0].die(WorkerLost("killed"))
    run.run()
    assert len({first, second, seed(run.fleet.workers[2])}) == 3


def test_answers_of_a_worker_that_was_given_up_are_dropped(run: ByHand) -> None:
    worker = run.start(0)
    run.source._places._any_works = True
    calls = list(worker.calls)
    worker.die(WorkerLost("killed"))
    run.run()
    for call in calls:
        call.then(Played("too late", IDLE))
    run.run()
    with pytest.raises(queue.Empty):
        run.learn()


def test_nodes_may_leave_as_often_as_they_like(run: ByHand) -> None:
    """Also before any worker has worked."""
    run.fleet.left.append("b")
    for _ in range(20):
        run.start(-1, node="b").die(WorkerLost("lost"))
        run.run()
    assert run.supervisor.failure is None
    assert run.source.status()["pending_actors"] == 2


def test_nodes_may_leave_before_their_workers_are_there(run: ByHand) -> None:
    for _ in range(20):
        run.fleet.workers[-1].die(WorkerLost("lost", has_left=True))
        run.run()
    assert run.supervisor.failure is None
    assert run.source.status()["replaced_actors"] == 20


@pytest.mark.parametrize("error", [Failed("KeyError: the joystick", False), RunError("store full")])
def test_what_an_environment_raises_and_what_the_fleet_cannot_do_fails_the_run(
    run: ByHand, error: Any
) -> None:
    run.start(0).answer("play", error)
    run.run()
    failure = run.supervisor.failure
    assert failure is not None and failure.origin == "actor 0"
    assert str(failure.error) in ("KeyError: the joystick", "store full")


class Clock:
    time = 1000.0

    def monotonic(self) -> float:
        return self.time


def test_a_worker_that_hangs_is_named_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not answer, because its environment never returns to Python."""
    clock = Clock()
    monkeypatch.setattr(ray_source, "time", clock)
    run = ByHand()
    worker = run.start(0)
    run.source._places._any_works = True
    run.source._poll()
    worker.answer("activity", ActivityReport("environment", 5.0, {}, 0))
    run.run()
    run.source._poll()
    clock.time += 4.0
    assert run.source.hanging() == ""
    clock.time += 56.0
    assert run.source.hanging() == (
        "actor 0 has been in one step of its environments for 65 s; "
        "actor 1 has found no room on the cluster for 60 s"
    )
    assert worker.waiting("activity") == [()], "it is not asked again and again"
    clock.time += 535.0
    run.source._poll()
    assert worker.is_killed and len(run.fleet.workers) == 3
    assert not run.fleet.workers[1].is_killed, "which only waits for room"
    assert run.supervisor.failure is None


def test_a_slower_answer_of_another_lane_takes_nothing_back(run: ByHand) -> None:
    worker = run.start(0)
    run.source._poll()
    worker.answer("activity", ActivityReport("environment", 0.0, {}, 12))
    worker.answer("play", Played("rollout", ActivityReport("queueing", 0.0, {}, 10)))
    run.run()
    assert run.source.status()["collected_steps"] == 12


def test_nothing_is_done_any_more_once_it_is_closed(run: ByHand) -> None:
    worker = run.start(0)
    run.source._places._any_works = True
    run.source.close()
    for call in list(worker.calls):
        call.then(WorkerLost("killed"))
    events = [run.source._events.get_nowait() for _ in range(run.source._events.qsize())]
    for event in filter(None, events):
        event()
    assert len(run.fleet.workers) == 2
    assert list(run.source.batches()) == []
