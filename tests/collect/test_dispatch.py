# SPDX-License-Identifier: Apache-2.0
"""What the dispatcher of a fleet's source sends to workers, and does when they are lost.

The fleet here is a list of calls, which the tests answer one by one, in this thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from compliance.source import Setup
from fleet_running import source_of

from torchbeast.collect import source
from torchbeast.collect.worker import ActivityReport, PlayedRollout, Started
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.fleet import WorkerLocation, WorkerLost
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import RunningClock

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
    own_node, host, shares_memory = "a", "10.0.0.1", False

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.stored: list[Any] = []
        self.left: list[str] = []  # nodes

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> FakeWorker:
        self.workers.append(FakeWorker(name))
        return self.workers[-1]

    def put(self, value: Any) -> Any:
        self.stored.append(value)
        return f"reference {len(self.stored) - 1}"

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        return WorkerLost(str(error), error.has_left or (place and place.node) in self.left)


class OneThread(Supervisor):
    """Runs in this thread what deals with lost workers; dispatcher and collector are the test."""

    def start_thread(self, name: str, body: Callable[[], None]) -> Any:
        if name.startswith("worker"):
            body()


class ByHand:
    """A source whose dispatcher runs when the test says so."""

    def __init__(self, setup: Setup = SETUP, **options: Any) -> None:
        self.fleet, self.supervisor = FakeFleet(), OneThread()
        self.source = source_of(setup, self.fleet, **options)
        self.agent, self.weights = self.source._learner.rollouts.agent, self.source._weights
        self.source.start(self.supervisor)
        self.run()

    def run(self) -> None:
        """Runs the dispatcher until it has nothing to do."""
        self.source._dispatcher.run_events()

    def start(self, index: int, node: str = "b", reads_weights: bool = False) -> FakeWorker:
        worker = self.fleet.workers[index]
        worker.answer("place", WorkerLocation("10.0.0.1", 100 + index, node))
        worker.answer("start", Started(IDLE, reads_weights))
        self.run()
        return worker

    def learn(self) -> Any:
        """Takes a rollout as the collector does, and gives it back."""
        _, written = self.source._played.get_nowait()
        written.release()
        self.run()
        return written.arrays


def rollouts(worker: FakeWorker) -> list[int]:
    """Numbers of the rollouts that it is to play."""
    return [rollout for _, rollout, _, _ in worker.waiting("play")]


def loads(worker: FakeWorker) -> list[Any]:
    """Weights that it is sent beside its rollouts."""
    return [sent for (sent,) in worker.waiting("load")]


def test_the_first_failure_is_that_a_worker_cannot_start() -> None:
    """The program then ends the other workers, which are not lost."""
    fleet, supervisor = FakeFleet(), OneThread()
    made, start = source_of(SETUP, fleet), fleet.worker

    def started(name: str, descriptors: Sequence[int] = ()) -> FakeWorker:
        if fleet.workers:
            raise RunError("no thread can be started")
        return start(name)

    fleet.worker = started  # type: ignore[method-assign]
    with pytest.raises(RunError, match="no thread"):
        made.start(supervisor)
    made._dispatcher.run_events()
    assert fleet.workers[0].calls
    fleet.workers[0].die(WorkerLost("it was ended"))
    made._dispatcher.run_events()
    assert supervisor.failure is None


@pytest.fixture
def run() -> ByHand:
    return ByHand()


def test_no_more_is_played_than_there_is_room_for(run: ByHand) -> None:
    worker = run.start(0)
    assert rollouts(worker) == [0, 1], "two buffers an environment"
    worker.answer("play", PlayedRollout("rollout 0", IDLE))
    run.run()
    assert rollouts(worker) == [1], "its place is taken until it is learnt"
    assert run.learn() == "rollout 0"
    assert rollouts(worker) == [1, 2]
    assert rollouts(run.fleet.workers[1]) == [], "which has not started"


def test_rollouts_are_learnt_in_their_order_though_they_overtake_each_other(run: ByHand) -> None:
    worker = run.start(0)
    worker.answer("play", PlayedRollout("rollout 1", IDLE), number=1)
    run.run()
    with pytest.raises(queue.Empty):
        run.learn()
    worker.answer("play", PlayedRollout("rollout 0", IDLE))
    run.run()
    assert [run.learn(), run.learn()] == ["rollout 0", "rollout 1"]


def test_weights_are_stored_once_for_all_and_only_when_one_can_fetch_them(run: ByHand) -> None:
    assert len(run.fleet.stored) == 1, "both started with the same"
    first, second = run.start(0), run.start(1)
    for version in (8, 9, 10):
        run.weights.publish(run.agent.model, version)
    run.run()
    assert loads(first) == loads(second) == [(10, ["reference 1"])]
    run.weights.publish(run.agent.model, 11)
    run.run()
    assert len(run.fleet.stored) == 2, "both still fetch"
    first.answer("load", None)
    run.run()
    assert loads(first) == [(11, ["reference 2"])]
    first.answer("load", None)
    second.answer("load", None)
    run.run()
    assert loads(first) == [] and loads(second) == [(11, ["reference 2"])]
    assert len(run.fleet.stored) == 3
    second.answer("load", None)
    run.run()
    assert loads(first) == loads(second) == [], "nothing is newer"
    run.weights.publish(run.agent.model, 12)
    run.run()
    assert loads(first) == loads(second) == [(12, ["reference 3"])]


def test_workers_that_read_weights_by_themselves_are_sent_none(run: ByHand) -> None:
    here, there = run.start(0, reads_weights=True), run.start(1)
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert loads(here) == [] and loads(there) == [(8, ["reference 1"])]


def test_nothing_is_stored_while_all_workers_read_weights_by_themselves(run: ByHand) -> None:
    for index in range(2):
        run.start(index, reads_weights=True)
    run.weights.publish(run.agent.model, 8)
    assert not run.source._dispatcher._events, "the dispatcher is left alone"
    run.run()
    assert len(run.fleet.stored) == 1, "only what they started with"


def test_the_successor_of_a_worker_that_read_weights_is_sent_them_elsewhere(run: ByHand) -> None:
    run.source._restarts._any_works = True
    worker = run.start(0, reads_weights=True)
    run.start(1, reads_weights=True)
    worker.die(WorkerLost("its node has left", has_left=True))
    run.run()
    run.weights.publish(run.agent.model, 8)
    run.run()
    successor = run.start(2)
    assert loads(successor) == [(8, ["reference 1"])]


def test_workers_are_told_where_the_learners_weights_are(run: ByHand) -> None:
    address = run.fleet.workers[0].waiting("start")[0][0]["ring"]
    assert address.node == "a" and Path(address.file).exists()


def test_a_worker_that_waits_for_room_gets_newer_weights_with_its_next_rollout(run: ByHand) -> None:
    worker = run.start(0)
    for number in range(2):
        worker.answer("play", PlayedRollout(f"rollout {number}", IDLE))
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert loads(worker) == [] and len(run.fleet.stored) == 1
    run.weights.publish(run.agent.model, 9)
    run.learn()
    assert rollouts(worker) == [2]
    assert loads(worker) == [(9, ["reference 1"])]


def test_a_lost_worker_is_replaced_and_what_it_was_playing_is_played_by_no_one(run: ByHand) -> None:
    worker = run.start(0)
    run.start(1)
    worker.answer("play", PlayedRollout("rollout 0", IDLE._replace(steps=7)))
    run.run()
    worker.die(WorkerLost("the process was killed"))
    run.run()
    assert [worker.name for worker in run.fleet.workers] == ["worker 0", "worker 1", "worker 0.1"]
    assert [worker.is_killed for worker in run.fleet.workers] == [True, False, False], (
        "it may be out of reach only, and would keep its cores"
    )
    status = run.source.status()
    assert status["replaced_workers"] == 1 and status["live_workers"] == 1
    assert status["collected_steps"] == 7
    successor = run.start(2)
    assert rollouts(successor) == [3], "rollout 0 still waits; 2 is left out"
    assert run.learn() == "rollout 0"
    assert rollouts(successor) == [3, 4]
    assert run.supervisor.failure is None


def test_every_worker_gets_seeds_of_its_own(run: ByHand) -> None:
    def seed(worker: FakeWorker) -> int:
        return worker.waiting("start")[0][0]["seed"]

    first, second = map(seed, run.fleet.workers)
    run.source._restarts._any_works = True
    run.fleet.workers[0].die(WorkerLost("killed"))
    run.run()
    assert len({first, second, seed(run.fleet.workers[2])}) == 3


def test_answers_of_a_worker_that_was_given_up_are_dropped(run: ByHand) -> None:
    worker = run.start(0)
    run.source._restarts._any_works = True
    calls = list(worker.calls)
    worker.die(WorkerLost("killed"))
    run.run()
    for call in calls:
        call.then(PlayedRollout("too late", IDLE))
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
    assert run.source.status()["pending_workers"] == 2


def test_nodes_may_leave_before_their_workers_are_there(run: ByHand) -> None:
    for _ in range(20):
        run.fleet.workers[-1].die(WorkerLost("lost", has_left=True))
        run.run()
    assert run.supervisor.failure is None
    assert run.source.status()["replaced_workers"] == 20


@pytest.mark.parametrize("error", [RunError("KeyError: the joystick"), UsageError("no such game")])
def test_what_an_environment_raises_fails_the_run(run: ByHand, error: Any) -> None:
    run.start(0).answer("play", error)
    run.run()
    failure = run.supervisor.failure
    assert failure is not None and failure.origin == "worker 0"
    assert failure.error is error


class Clock:
    time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_a_worker_that_hangs_is_named_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not answer, because its environment never returns to Python."""
    clock = Clock()
    monkeypatch.setattr(source, "running_time", clock)
    run = ByHand()
    worker = run.start(0)
    run.source._restarts._any_works = True
    run.source._poll()
    worker.answer("activity", ActivityReport("environment", 5.0, {}, 0))
    run.run()
    run.source._poll()
    clock.time += 4.0
    assert run.source.hanging() == ""
    clock.time += 56.0
    assert run.source.hanging() == (
        "worker 0 has been in one step of its environments for 65 s; "
        "worker 1 has been starting for 60 s (still loading, or without free resources)"
    )
    assert worker.waiting("activity") == [()], "it is not asked again and again"
    clock.time += 535.0
    run.source._poll()
    assert worker.is_killed and len(run.fleet.workers) == 3
    assert not run.fleet.workers[1].is_killed, "which only waits for room"
    assert run.supervisor.failure is None


def test_a_worker_is_not_given_up_for_a_time_in_which_nobody_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm suspends a job by SIGSTOP to all of its processes, for any time."""
    clock = Clock()
    monkeypatch.setattr(source, "running_time", RunningClock(clock))
    run = ByHand()
    worker = run.start(0)
    run.source._restarts._any_works = True
    for _ in range(590):
        clock.time += 1.0
        run.source._poll()
    clock.time += 3600.0
    run.source._poll()
    assert not worker.is_killed
    for _ in range(5):
        clock.time += 1.0
        run.source._poll()
    assert worker.is_killed, "it hung before and after that time"


def test_a_slower_answer_of_another_lane_takes_nothing_back(run: ByHand) -> None:
    worker = run.start(0)
    run.source._poll()
    worker.answer("activity", ActivityReport("environment", 0.0, {}, 12))
    worker.answer("play", PlayedRollout("rollout", ActivityReport("queueing", 0.0, {}, 10)))
    run.run()
    assert run.source.status()["collected_steps"] == 12


def test_over_child_processes_an_event_runs_where_it_happens_but_never_inside_another(
    run: ByHand,
) -> None:
    run.source._dispatcher._runs_in_place = True
    ran: list[str] = []

    def first() -> None:
        run.source._dispatcher.do(lambda: ran.append("second"))
        ran.append("first")

    run.source._dispatcher.do(first)
    assert ran == ["first", "second"]


def test_nothing_is_done_any_more_once_it_is_closed(run: ByHand) -> None:
    worker = run.start(0)
    run.source._restarts._any_works = True
    run.source.close()
    for call in list(worker.calls):
        call.then(WorkerLost("killed"))
    run.run()
    assert len(run.fleet.workers) == 2
    assert list(run.source.batches()) == []


def test_a_worker_that_never_says_that_it_plays_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its environment keeps Python from answering, from the first step of a rollout on."""
    clock = Clock()
    monkeypatch.setattr(source, "running_time", clock)
    run = ByHand()
    worker = run.start(0)
    run.source._restarts._any_works = True
    clock.time += 599.0
    assert run.source.hanging().startswith("worker 0 has been without an answer for 599 s")
    assert run.source.status()["waiting_workers"] == 0
    run.source._poll()
    assert not worker.is_killed
    clock.time += 1.0
    run.source._poll()
    assert worker.is_killed and run.source.status()["replaced_workers"] == 1


def test_a_worker_that_waits_for_room_for_a_rollout_never_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(source, "running_time", clock)
    run = ByHand()
    worker = run.start(0)
    for number in range(2):
        worker.answer("play", PlayedRollout(f"rollout {number}", IDLE))
    run.run()
    clock.time += 3600.0
    run.source._poll()
    assert not worker.is_killed and run.source.status()["waiting_workers"] == 1
    assert "worker 0" not in run.source.hanging()


def test_a_successor_that_cannot_start_is_followed_by_another(run: ByHand) -> None:
    """As when a file that its environment reads is away for a moment."""
    worker = run.start(0)
    worker.answer("play", PlayedRollout("rollout 0", IDLE))
    run.run()
    worker.die(ProcessDied("was killed"))
    run.run()
    run.source._restarts.closed.wait = lambda pause: pauses.append(pause)
    pauses: list[float] = []
    run.fleet.workers[-1].answer("start", UsageError("the file is away"))
    run.run()
    assert run.supervisor.failure is None and pauses == [10.0]
    assert [worker.name for worker in run.fleet.workers[2:]] == ["worker 0.1", "worker 0.2"]


# --- a fixed lag

IN_TURN = Setup(env_id="source_envs:Numbered", num_envs=2, num_groups=2, batch_size=2, version=7)


def granted(run: ByHand) -> list[list[tuple[int, int]]]:
    """Numbers of the rollouts of each worker, with the versions that shall act in them."""
    return [
        [(rollout, wanted) for _, rollout, wanted, _ in worker.waiting("play")]
        for worker in run.fleet.workers
    ]


def test_a_slot_is_granted_once_the_weights_exist_that_are_as_old_as_the_lag() -> None:
    """A batch holds a rollout of each; there are three slots an environment."""
    run = ByHand(IN_TURN, num_buffers=6, fixed_lag=1)
    for index in range(2):
        run.start(index, reads_weights=True)
    assert granted(run) == [[(0, 7), (1, 7)]] * 2, "the third is for version 8"
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert granted(run) == [[(0, 7), (1, 7), (2, 8)]] * 2


def test_a_successor_plays_with_the_versions_that_the_lost_worker_should_have() -> None:
    run = ByHand(IN_TURN, num_buffers=6, fixed_lag=1)
    worker = run.start(0, reads_weights=True)
    run.start(1, reads_weights=True)
    run.weights.publish(run.agent.model, 8)
    worker.answer("play", PlayedRollout("rollout 0", IDLE))
    run.run()
    worker.die(ProcessDied("was killed"))
    run.run()
    run.start(2, reads_weights=True)
    assert granted(run)[2] == [(4, 7), (5, 8)], "rollout 0 waits to be learnt"


def test_rollouts_are_learnt_in_turn() -> None:
    run = ByHand(IN_TURN, num_buffers=4, fixed_lag=1)
    first, second = (run.start(index, reads_weights=True) for index in range(2))
    for number in range(2):
        second.answer("play", PlayedRollout(f"second {number}", IDLE))
    first.answer("play", PlayedRollout("first 0", IDLE))
    run.run()
    run.source._played.put(None)
    played = run.source._pacing.in_order(iter(run.source._played.get, None))
    assert [written.arrays for written in played] == ["first 0", "second 0"]


def test_a_worker_that_cannot_read_weights_is_sent_those_of_its_rollout() -> None:
    run = ByHand(IN_TURN, num_buffers=2, fixed_lag=0)
    here, there = run.start(0, reads_weights=True), run.start(1)
    (reading,), (sent,) = here.waiting("play"), there.waiting("play")
    assert reading[2:] == (7, None) and sent[2:] == (7, None), "it started with them"
    for worker in (here, there):
        worker.answer("play", PlayedRollout("rollout", IDLE))
    run.run()
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert [run.learn(), run.learn()] == ["rollout", "rollout"]
    (reading,), (sent,) = here.waiting("play"), there.waiting("play")
    assert reading[2:] == (8, None) and sent[2:] == (8, (8, ["reference 1"]))
    run.weights.publish(run.agent.model, 9)
    run.run()
    assert loads(there) == [], "newer weights would act too early"


def test_on_demand_nothing_is_played_before_a_batch_is_asked_for() -> None:
    run = ByHand(IN_TURN, num_buffers=6, fixed_lag=0, on_demand=True)
    for index in range(2):
        run.start(index, reads_weights=True)
    run.weights.publish(run.agent.model, 8)
    run.run()
    assert granted(run) == [[], []]
    pacing: Any = run.source._pacing
    pacing.request()
    pacing.request()  # by an iterator that takes what another has asked for in vain
    run.run()
    assert granted(run) == [[(0, 8)], [(0, 8)]]
