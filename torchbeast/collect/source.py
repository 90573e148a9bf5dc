# SPDX-License-Identifier: Apache-2.0
"""The source of a fleet of workers: rollouts -> batches. Python only.

    worker 0 [env x E, model] --+                                      +--> batches() --> learner
    worker 1 [env x E, model] --+-- rollouts -- dispatcher, collector -+
         ^                      |                     the batch in preparation
         +-- play(), load() ----+

A slot is room for one rollout of all environments of a worker. The source grants the slot to the
worker, which then plays the rollout. Child processes write it into a slot in shared memory; Ray
actors return it as arrays. The collector copies its columns into the batch in preparation, and the
slot can be granted again. Only this module decides which worker acts when, and with which weights.

By default the learner takes rollouts in the order in which they are completed, nobody waits for a
slow worker, and every action is chosen with the newest weights. Workers read the weights from the
learner's memory. If a worker cannot, the source sends them, one version at a time, always the
newest. With a fixed lag of K, the learner takes the rollouts of the workers in turn. A slot is
granted as soon as the weights exist that will be K updates old when the learner uses the rollout,
so the run is reproducible regardless of the speed of its workers. On demand, every worker gets a
slot when the learner asks for the next batch, and acts with the weights of that moment.

A worker that dies is replaced; its successor starts new episodes with other seeds. A worker that is
lost together with its node is replaced as soon as there is room, and the run continues without it
until then.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from torchbeast.collect import rollout_buffers as buffers
from torchbeast.collect.config import BufferedActorsConfig, split_evenly
from torchbeast.collect.contract import ACTOR_STAGES, CollectionPlan, LearnerInfo, LostStream
from torchbeast.collect.dispatch import Dispatcher, Event, FixedLag, Free, OnDemand
from torchbeast.collect.weights import SharedWeights, address_of, ring_size
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.fleet import Fleet, LocalFleet, Worker, WorkerLocation, WorkerLost, error_in
from torchbeast.fleets.supervisor import RestartPolicy, Restarts, Supervisor
from torchbeast.fleets.system import allow_descriptors, limit_kept, uninterrupted
from torchbeast.fleets.waiting import WAIT_S, running_time
from torchbeast.seeds import seed_of

if TYPE_CHECKING:  # what workers return; only their processes load the module
    from torchbeast.collect.worker import ActivityReport, PlayedRollout, Started

WORKER = "torchbeast.collect.worker:RolloutWorker"
"""The class of the workers that a fleet has to make."""

_log = logging.getLogger("torchbeast.actors")

_WAITING_FOR_ROOM = "no room yet"  # an additional stage: the worker has no place yet
_SILENT = "silent"  # an additional stage: it has a rollout to play, but does not answer
_DOING = {
    "environment": "in one step of its environments",
    "inference": "in one forward pass",
    "starting": "starting",
    _SILENT: "without an answer",
}
"""Descriptions of stages for messages. In all other stages a worker waits for its turn."""

_HANG_S = 600.0
"""Longest time in one stage of `_DOING`. PolyBeast has the same limit for one step."""
_FILES_OF_A_WORKER = 6  # pipes and socket of its process, and its slots, which mmap opens again
_OTHER_FILES = 200


class FleetSource:
    """Yields batches of rollouts from the workers of a fleet.

    Threads: `start` adds two threads to the supervisor, the dispatcher and the collector. Only
    events communicate with workers, and the dispatcher runs one event at a time. When the run
    ends, the supervisor closes the source, which wakes every waiting thread, and the fleet ends the
    workers. Several threads may iterate `batches`, each with its own iterator. A batch shares
    memory with the source and is valid until its iterator advances or ends.

    num_bytes: of batches, weights, and slots (without their final observations).
    """

    def __init__(
        self, learner: LearnerInfo, env: EnvSpec, fleet: Fleet, plan: FleetCollection
    ) -> None:
        """Allocates buffers and shared memory.

        fleet: makes WORKERs. With a fixed lag, whole rollouts must fill a batch.
        """
        actors, num_workers = plan.actors, plan.processes
        self._batch_size, num_envs = learner.batch_size, actors.environments()
        self._learner, self._env, self._fleet = learner, env, fleet
        self._weights: SharedWeights = learner.weights
        self._pacing, in_turn = Free(), (self._weights, self._batch_size, num_workers)
        if plan.on_demand:
            self._pacing = OnDemand(*in_turn, self._grant_after)
        elif plan.fixed_lag is not None:
            self._pacing = FixedLag(*in_turn, plan.fixed_lag)
        self._dispatcher = Dispatcher(fleet.shares_memory, self._poll)
        self._played: queue.Queue[tuple[int, buffers.Written] | None] = queue.Queue()
        self._stored: tuple[int, Any] | None = None  # version of the weights, reference
        self._options: Mapping[str, Any] | None = None  # for the resets of environments
        self._is_told = threading.Event()  # set: the dispatcher knows that there are newer weights
        self._restarts = Restarts(_log)
        # One is in preparation.
        num_batches = 1 + learner.batches_at_once + actors.batches_ahead(self._batch_size)
        self._collector = buffers.Collector(buffers.batch_buffers(learner, num_batches))
        self.num_slots = actors.slots_per_process()
        slots = self.num_slots * buffers.slot_bytes(learner.rollouts, num_envs)
        self.num_bytes = self._collector.num_bytes + slots + self._weights.num_bytes
        counts = split_evenly(num_envs, num_workers)
        first_envs = itertools.accumulate(counts, initial=0)
        self._actors = [
            _Actor(index, count, first, self)
            for index, (count, first) in enumerate(zip(counts, first_envs, strict=False))
        ]

    def new_slots(self, num_envs: int) -> buffers.SharedRollouts | None:
        """Returns the slots of a worker, in shared memory; None: it returns arrays instead."""
        if not self._fleet.shares_memory:
            return None
        return buffers.SharedRollouts(self._learner.rollouts, num_envs, self.num_slots)

    def start(self, supervisor: Supervisor) -> None:
        """Requests workers from the fleet, and starts the threads that collect from them."""
        self._supervisor = self._restarts.supervisor = supervisor
        supervisor.on_close(self.close)
        self._weights.on_publish = self._tell_dispatcher
        self._dispatcher.start(supervisor)
        try:
            for actor in self._actors:
                self._restarts.start(actor)
        except BaseException:
            self.close()  # before the fleet ends the others, which would be the first failure
            raise
        played = self._pacing.in_order(iter(self._played.get, None))
        supervisor.start_thread("collector", functools.partial(self._collector.collect, played))

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts `[T+1, batch_size + spare_columns, ...]` on the CPU, until the source is
        closed. Spare columns hold whatever the memory held.
        """
        return self._pacing.batches(self._collector.batches())

    def close(self) -> None:
        """Wakes every waiting thread, and stops granting slots. May be called again."""
        self._restarts.close()
        self._collector.close()
        self._dispatcher.close()
        self._played.put(None)

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Sends options to every worker; later workers get them when they start."""
        self._options = options
        self._dispatcher.do(self._send_options)

    def status(self) -> dict[str, int]:
        """Returns the current number of rollouts that wait for the learner and for the collector,
        and of workers: alive, waiting for room on the cluster, and waiting for a slot. Totals: of
        replaced workers and of collected steps.
        """
        stages = [actor.present()[0] for actor in self._actors]
        pending = {"pending_workers": stages.count(_WAITING_FOR_ROOM)}
        return {
            "learner_queue_size": len(self._collector) * self._batch_size,
            "rollout_queue_size": self._played.qsize(),
            "live_workers": sum(actor.is_alive for actor in self._actors),
            **({} if self._fleet.shares_memory else pending),
            "waiting_workers": stages.count("queueing"),
            "replaced_workers": self._restarts.replaced,
            "collected_steps": sum(report.steps for report in self._reports()),
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all workers have spent since the start, by stage, and those of
        other machines' processors.
        """
        stages = ACTOR_STAGES if self._fleet.shares_memory else (*ACTOR_STAGES, "computing")
        return {stage: sum(r.seconds[stage] for r in self._reports()) for stage in stages}

    def _reports(self) -> list[ActivityReport]:
        return [report for actor in self._actors for report in actor.reports()]

    def hanging(self) -> str:
        """Describes workers that have been in one stage, or without room, for over WAIT_S."""
        described = [text for actor in self._actors if (text := actor.hanging())]
        if described and self._pacing.takes_turns:
            described.append("with a fixed lag the others wait for its turn")
        return "; ".join(described)

    def lost_streams(self) -> list[LostStream]:
        """Returns []: lost workers are replaced immediately, or wait for room."""
        return []

    # --- the learner thread that publishes

    def _tell_dispatcher(self) -> None:
        all_read = not self._pacing.takes_turns and all(a.reads_weights for a in self._actors)
        if not (all_read or self._is_told.is_set()):
            with uninterrupted():
                self._is_told.set()
                # cleared before anybody reads them, so that newer ones set it again
                self._grant_after(self._is_told.clear)

    # --- the thread that starts or replaces a worker

    def start_worker(self, actor: _Actor) -> None:
        """Requests a worker from the fleet; an event starts it."""
        shared = [] if actor.slots is None else [actor.slots.descriptor, self._weights.descriptor]
        worker = self._fleet.worker(actor.full_name, shared)
        self._dispatcher.do(functools.partial(self._begin, actor, worker))

    # --- events: everything below

    def _begin(self, actor: _Actor, worker: Worker) -> None:
        """Starts a new worker in an actor's place."""
        actor.worker, actor.since = worker, running_time()
        self._call(actor, self._placed, "place")
        sent = None if self._fleet.shares_memory else self._newest(actor)
        self._call(actor, self._started, "start", self._arguments_of(actor), sent)

    def _send_options(self) -> None:
        for actor in self._actors:
            if actor.worker is not None:
                self._call(actor, lambda actor, answer: None, "set_options", self._options)

    def _call(
        self, actor: _Actor, then: Callable[[_Actor, Any], None], method: str, *arguments: Any
    ) -> None:
        """Calls a method of the actor's worker, and calls `then` with the result in an event.

        It handles lost workers and failures, and drops results of workers that were replaced.
        """
        incarnation = actor.incarnation

        def answered(result: Any) -> None:
            if actor.incarnation != incarnation or self._restarts.closed.is_set():
                return
            error = error_in(result, lambda lost: self._fleet.explain(lost, actor.place))
            if error is None:
                then(actor, result)
            else:
                self._lost(actor, error)

        assert actor.worker is not None
        actor.worker.call(
            lambda result: self._dispatcher.do(functools.partial(answered, result)),
            method,
            *arguments,
        )

    def _placed(self, actor: _Actor, place: WorkerLocation) -> None:
        actor.place, actor.since = place, running_time()
        _log.info("%s is process %d on %s", actor.full_name, place.pid, place.host)

    def _started(self, actor: _Actor, started: Started) -> None:
        actor.is_alive, actor.reads_weights = True, started.reads_weights
        actor.report(started.activity)
        self._grant(actor)

    # rollouts

    def _grant_after(self, change: Event) -> None:
        """Runs an event after which the pacing may grant more, and grants it."""

        def grant() -> None:
            change()
            for actor in self._actors:
                self._grant(actor)

        self._dispatcher.do(grant)

    def _grant(self, actor: _Actor) -> None:
        """Grants the actor its free slots, as far as the pacing permits."""
        while actor.is_alive and actor.free:
            number = actor.given * len(self._actors) + actor.index
            grant = self._pacing.grant(number, actor.num_envs)
            if grant is None:
                break
            wanted = grant.version
            is_sent = wanted is not None and not actor.reads_weights
            sent = self._newest(actor) if is_sent and actor.version != wanted else None
            slot, rollout = actor.grant()
            played = functools.partial(self._has_played, rollout)
            self._call(actor, played, "play", slot, rollout, wanted, sent)
        self._send_to(actor)

    def _has_played(self, rollout: int, actor: _Actor, played: PlayedRollout) -> None:
        self._restarts.works(actor)
        actor.report(played.activity)
        for slot, arrays in actor.in_order(rollout, played.arrays):
            free = functools.partial(self._free, actor, slot)
            release = functools.partial(self._dispatcher.do, free)
            self._played.put((actor.index, buffers.Written(arrays, actor.num_envs, release)))

    def _free(self, actor: _Actor, slot: int) -> None:
        """Grants the slot again, after its rollout was copied into a batch."""
        actor.free.append(slot)
        self._grant(actor)

    # weights

    def _send_to(self, actor: _Actor) -> None:
        """Sends the newest weights to an actor that plays, unless it is still fetching earlier
        ones, or reads the weights itself.
        """
        wants = actor.is_playing and actor.version != self._weights.version
        if wants and not (self._pacing.takes_turns or actor.fetches or actor.reads_weights):
            actor.fetches = True
            self._call(actor, self._has_loaded, "load", self._newest(actor))

    def _has_loaded(self, actor: _Actor, _: None) -> None:
        actor.fetches = False
        self._send_to(actor)

    def _newest(self, actor: _Actor) -> tuple[int, list[Any]]:
        """Returns the newest version and a reference to its weights; stores each version once."""
        if self._stored is None or self._stored[0] != self._weights.version:
            version, weights = self._weights.newest
            self._stored = version, self._fleet.put(weights)
        actor.version, reference = self._stored
        return actor.version, [reference]

    # what workers do

    def _poll(self) -> None:
        for actor in self._actors:
            stage, seconds = actor.present()
            if stage in _DOING and seconds >= _HANG_S and actor.worker is not None:
                why = f"was given up after {seconds:.0f} s {_DOING[stage]}"
                self._lost(actor, WorkerLost(why))
            elif actor.is_alive and not actor.is_asked:
                actor.is_asked = True
                self._call(actor, _Actor.answer, "activity")

    # ends

    def _lost(self, actor: _Actor, error: Exception) -> None:
        """Replaces a worker, or fails the run, in another thread, because that may have to wait.

        The worker is killed, because a worker that hangs or is out of reach may still be running.
        """
        assert actor.worker is not None
        actor.worker.kill()
        actor.forget_worker()
        has_left = isinstance(error, WorkerLost) and error.has_left
        deal = self._restarts.replace if has_left else self._restarts.ended
        self._supervisor.start_thread(actor.name, functools.partial(deal, actor, error))

    def _arguments_of(self, actor: _Actor) -> dict[str, Any]:
        """Returns the arguments of an actor's worker."""
        learner, fleet = self._learner, self._fleet
        rollouts = learner.rollouts
        return {
            "env": self._env.dealt(actor.first_env, actor.num_envs).as_json(),
            "actor": rollouts.agent.spec.as_json(),
            "precision": learner.precision,
            "unroll_length": rollouts.unroll_length,
            "extras": rollouts.extras,
            "mode": learner.mode,
            "options": self._options,
            "num_slots": 1 if actor.slots is None else self.num_slots,
            "ring": address_of(self._weights, fleet.own_node, fleet.shares_memory),
            "num_envs": actor.num_envs,
            "first_env": actor.first_env,
            "slots": None if actor.slots is None else actor.slots.descriptor,
            "seed": seed_of(learner.seed, "actor", actor.index, actor.incarnation),
        }


class _Actor:
    """A place for one worker at a time. Only events write to it, any thread may read."""

    def __init__(self, index: int, num_envs: int, first_env: int, source: FleetSource) -> None:
        self.index = index
        self.num_envs, self.first_env = num_envs, first_env
        self.slots, self._source = source.new_slots(num_envs), source
        self.name = f"worker {index}"
        self.restart_policy = RestartPolicy()
        self.incarnation = 0
        self.free = collections.deque(range(source.num_slots))
        self.given = 0  # number of granted rollouts, without lost ones
        self._next_rollout = 0
        self._before: list[ActivityReport] = []  # last reports of earlier workers in this place
        self._forget()

    def _forget(self) -> None:
        self.worker: Worker | None = None
        self.is_alive = False  # and has started
        self.place: WorkerLocation | None = None
        self.version = -1  # the newest weights that were sent to it
        self.reads_weights = False  # from the learner's memory
        self.fetches = False  # whether it is loading weights
        self.is_asked = False  # whether a status request is unanswered
        self.since = running_time()
        self._granted: dict[int, int] = {}  # rollout -> slot, in order, until it is played
        self._early: dict[int, Any] = {}  # arrived before rollouts that were granted earlier
        self._report: tuple[float, ActivityReport] | None = None

    @property
    def full_name(self) -> str:
        """The unique name of the worker, for example in Ray's dashboard."""
        return f"{self.name}.{self.incarnation}" if self.incarnation else self.name

    def start(self) -> None:
        """Requests a worker from the fleet: the first one, or a replacement."""
        self._source.start_worker(self)

    def forget_worker(self) -> None:
        """Frees the slots of a worker that is gone together with its unfinished rollouts."""
        self.free += self._granted.values()
        self.given -= len(self._granted)
        if self._report is not None:
            self._before.append(self._report[1])
        self._next_rollout += 1  # the successor's rollouts do not continue these
        self.incarnation += 1
        self._forget()

    @property
    def is_playing(self) -> bool:
        """Whether it has rollouts to play. Without, it does not need newer weights yet."""
        return self.is_alive and bool(self._granted)

    def grant(self) -> tuple[int, int]:
        """Takes a free slot for the next rollout; returns the slot and the rollout's number."""
        slot, rollout = self.free.popleft(), self._next_rollout
        self._granted[rollout] = slot
        self._next_rollout += 1
        self.given += 1
        return slot, rollout

    def in_order(self, rollout: int, arrays: Any) -> Iterator[tuple[int, Any]]:
        """Yields slot and arrays of all rollouts that are complete in order, after this arrival."""
        self._early[rollout] = arrays
        while self._granted and (first := next(iter(self._granted))) in self._early:
            slot, arrays = self._granted.pop(first), self._early.pop(first)
            yield slot, arrays if self.slots is None else self.slots.slots[slot]

    def report(self, activity: ActivityReport) -> None:
        """Keeps the worker's report, unless it is outdated: two lanes may reorder reports."""
        if self._report is None or activity.steps >= self._report[1].steps:
            self._report = running_time(), activity

    def answer(self, activity: ActivityReport) -> None:
        """Keeps the answer to a status request."""
        self.is_asked = False
        self.report(activity)

    def present(self) -> tuple[str, float]:
        """Returns the current stage, and the seconds since it began.

        A worker that does not answer counts as still in its last stage. But if that stage is
        waiting for a slot and it has been granted one since, it counts as silent.
        """
        now = running_time()
        if self._report is None:
            has_room = self.place or self.slots is not None
            return ("starting" if has_room else _WAITING_FOR_ROOM), now - self.since
        told, activity = self._report
        if activity.stage == "queueing" and self._granted:
            return _SILENT, now - told
        return activity.stage, activity.seconds_in_stage + now - told

    def hanging(self) -> str:
        """Describes a stage, or a wait for room, of over WAIT_S, or returns ""."""
        stage, seconds = self.present()
        if seconds < WAIT_S:
            return ""
        if stage == _WAITING_FOR_ROOM:
            why = "still loading, or without free resources"
            return f"{self.name} has been starting for {seconds:.0f} s ({why})"
        doing = _DOING.get(stage)
        return f"{self.name} has been {doing} for {seconds:.0f} s" if doing else ""

    def reports(self) -> list[ActivityReport]:
        """Returns the last report of every worker that has been in this place."""
        last = self._report
        return [*self._before, *([] if last is None else [last[1]])]


@dataclass(frozen=True, kw_only=True)
class FleetCollection(CollectionPlan):
    """Collects with the workers of a fleet: processes of this machine, or actors of Ray.

    on_demand: collect only when the learner asks for a batch, in one thread, whatever the version
    of the weights; needs a fixed lag of 0.
    """

    processes: int
    actors: BufferedActorsConfig
    make_fleet: Callable[[], AbstractContextManager[Fleet]]
    on_demand: bool = False

    def weights(self, model: nn.Module, version: int) -> SharedWeights:
        """Returns weights that workers share, with the versions that a fixed lag needs."""
        return SharedWeights(model, version, ring_size(self.fixed_lag))

    def source(self, learner: LearnerInfo, env: EnvSpec, ending: ExitStack) -> FleetSource:
        """Makes the source; `ending` ends the fleet, and restores the limit of open files."""
        ending.enter_context(limit_kept())
        allow_descriptors(_FILES_OF_A_WORKER * self.processes + _OTHER_FILES)
        fleet = ending.enter_context(self.make_fleet())
        return FleetSource(learner, env, fleet, self)


def local_fleet() -> LocalFleet:
    """Returns a fleet of processes with one thread each, because there is one for each core."""
    return LocalFleet(WORKER, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
