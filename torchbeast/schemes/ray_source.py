# SPDX-License-Identifier: Apache-2.0
"""RayBeast's source: workers anywhere on a cluster -> rollouts -> batches.

    worker 0 [env x E, model] --+                                      +--> batches() --> learner
    worker 1 [env x E, model] --+-- rollouts -- dispatcher, collector -+
         ^                      |  (object store)      the batch in preparation
         +-- play(), load() ----+

Every worker has a few calls of `play` in flight, so that it goes on while its rollouts are on their
way or wait for the learner; none is sent before there is room for its rollout. Rollouts are learnt
in the order in which they arrive, and nobody waits for a slow worker. Newer weights act from the
next step on. A worker on the learner's machine reads them from shared memory, as MonoBeast's
processes do; to others they are sent beside `play`, and one that still fetches a version gets the
newest next.

A worker that dies is replaced by one that begins new episodes, with seeds of its own. One that is
lost with its node is too, wherever there is room, and until then the run does without it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.registry import Agent
from torchbeast.core.specs import ActorSpec, Precision
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.places import Deaths, Places
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes.config import RayConfig
from torchbeast.schemes.room import stored_bytes
from torchbeast.seeds import seed_of
from torchbeast.sources.config import RolloutConfig, split_evenly
from torchbeast.sources.contract import ACTOR_STAGES, WAIT_S, Away
from torchbeast.sources.processes.activity import DOING, HANG_S
from torchbeast.sources.processes.collector import Collector, Written
from torchbeast.sources.processes.fleet import Fleet, Place, Worker, WorkerLost
from torchbeast.sources.processes.rollout_buffers import Batch, slot_bytes
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.processes.weights_ring import address_of
from torchbeast.sources.processes.worker import (
    END_S,
    ActivityReport,
    Failed,
    Packed,
    Played,
    Started,
    packed_state,
)

_log = logging.getLogger("torchbeast.ray")

_POLL_S = 1.0  # between two questions to each worker what it does
_WAITING_FOR_ROOM = "no room yet"  # a stage of ours: its worker is nowhere yet

Event = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class RaySourceConfig:
    """Settings of the collection of rollouts."""

    env: EnvSpec
    actor: ActorSpec  # every worker makes its own copy of the network
    precision: Precision  # of the workers' features, on the CPU
    fleet: RayConfig
    num_workers: int
    rollouts: RolloutConfig
    extras: tuple[str, ...]  # names of the outputs of acting to put into rollouts
    mode: Mode  # in which actions are chosen
    num_batches: int = 2  # one in preparation, the others used by learner threads
    spare_columns: int = 0  # of a batch, after the rollouts: left to who takes it
    seed: int


def rollout_bytes(agent: Agent, config: RaySourceConfig) -> int:
    """Returns the size of a rollout of one environment, without final observations."""
    return slot_bytes(RolloutSpec(agent, config.extras, config.rollouts.unroll_length), num_envs=1)


class FleetWeights:
    """The newest weights. One thread publishes, another one sends.

    ring: shared memory, from which workers on this machine read them.
    """

    def __init__(self, model: nn.Module, version: int = 0) -> None:
        self.ring = SharedWeights(model, version)
        self.on_publish: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        """Newest published version."""
        return self.ring.version

    @property
    def newest(self) -> tuple[int, Packed]:
        """Newest version and a copy of its weights, to be sent.

        Nobody waits: the copy is made again if its place in the ring has been written to.
        """
        while True:
            version = self.ring.version
            weights = packed_state(self.ring.state_of(version))
            if self.ring.holds(version):
                return version, weights

    @property
    def num_bytes(self) -> int:
        """Size of one version."""
        return self.ring.num_bytes // self.ring.size

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as the newest version.

        Waits for no worker: a version whose place is being read, by one that was stopped in the
        middle, is left out.
        """
        if self.ring.publish_if_free(model, version):
            self.on_publish()


class RaySource:
    """Yields batches of rollouts from the workers of a fleet.

    Threads: `start` adds two to the supervisor, the dispatcher, which alone talks to workers, and
    the collector. When the run ends, the supervisor closes the source, which wakes every waiting
    thread; `end` then ends the workers. `batches` may be iterated from several threads, each with
    its own iterator. A batch shares memory with the source and is valid until its iterator advances
    or ends.
    """

    yields = Rollout

    def __init__(
        self,
        agent: Agent,
        weights: FleetWeights,
        device: torch.device,
        fleet: Fleet,
        config: RaySourceConfig,
    ) -> None:
        """Allocates buffers.

        device: the learner's; batches for a GPU are in pinned memory.
        """
        self._config, self._weights, self._fleet = config, weights, fleet
        self._batch_size = config.rollouts.batch_size
        length, keywords = config.rollouts.unroll_length, config.env.options.info_keywords
        spec, pin = RolloutSpec(agent, config.extras, length, keywords), device.type == "cuda"
        num_batches = config.num_batches + config.fleet.batches_ahead(self._batch_size)
        batches = (
            Batch(spec, self._batch_size, pin, config.spare_columns) for _ in range(num_batches)
        )
        self._collector = Collector(batches)
        self._rollout_bytes = rollout_bytes(agent, config)
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._played: queue.Queue[Written | None] = queue.Queue()
        self._stored: tuple[int, Any] | None = None  # version of the weights, reference
        self._is_told = threading.Event()  # that there are newer weights
        self._places = Places(_log)
        counts = split_evenly(config.fleet.environments(), config.num_workers)
        first_envs = [0, *itertools.accumulate(counts)]
        self._actors = [
            _Actor(index, envs, self._begin)
            for index, envs in enumerate(zip(counts, first_envs, strict=False))
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the batches, of the ring of weights, and of what may be in the object store."""
        rollouts = self._config.fleet.buffers()
        stored = stored_bytes(self._rollout_bytes, rollouts, self._weights.num_bytes)
        return self._collector.num_bytes + self._weights.ring.num_bytes + stored

    def start(self, supervisor: Supervisor) -> None:
        """Asks for workers, and starts the threads that collect from them."""
        self._supervisor = self._places.supervisor = supervisor
        supervisor.on_close(self.close)
        self._weights.on_publish = self._tell_dispatcher
        supervisor.start_thread("dispatcher", self._dispatch)
        supervisor.start_thread("collector", self._collect)

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts `[T+1, batch_size, ...]` on the CPU, until the source is closed."""
        return self._collector.batches()

    def close(self) -> None:
        """Wakes every waiting thread. May be called again."""
        self._places.close()
        self._collector.close()
        self._events.put(None)
        self._played.put(None)

    def end(self) -> None:
        """Lets workers close their environments; the fleet then ends those that do not."""
        workers = [actor.worker for actor in self._actors if actor.place and actor.worker]
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for worker in workers:
            worker.call(answers.put, "end")
        deadline = time.monotonic() + END_S
        for _ in workers:
            try:
                answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break

    def status(self) -> dict[str, int]:
        """Returns counts of the present: rollouts that wait for the learner and for the collector,
        workers, those of them that wait for room on the cluster, and those that wait for room for a
        rollout. Totals: replaced workers and collected steps.
        """
        stages = [actor.present()[0] for actor in self._actors]
        return {
            "learner_queue_size": len(self._collector) * self._batch_size,
            "rollout_queue_size": self._played.qsize(),
            "live_actors": sum(actor.is_alive for actor in self._actors),
            "pending_actors": stages.count(_WAITING_FOR_ROOM),
            "waiting_actors": stages.count("queueing"),
            "replaced_actors": self._places.replaced,
            "collected_steps": sum(actor.steps() for actor in self._actors),
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all workers have spent since the start, by stage."""
        each = [actor.seconds() for actor in self._actors]
        return {stage: sum(seconds.get(stage, 0.0) for seconds in each) for stage in ACTOR_STAGES}

    def hanging(self) -> str:
        """Describes the workers that have been in one stage, or found no room, for WAIT_S."""
        each = [(actor.name, *actor.present()) for actor in self._actors]
        said = [
            f"{name} has found no room on the cluster for {seconds:.0f} s"
            if stage == _WAITING_FOR_ROOM
            else f"{name} has been {DOING[stage]} for {seconds:.0f} s"
            for name, stage, seconds in each
            if seconds >= WAIT_S and (stage in DOING or stage == _WAITING_FOR_ROOM)
        ]
        return "; ".join(said)

    def away(self) -> list[Away]:
        """Returns []: a worker that is lost is replaced at once, or waits for room."""
        return []

    # --- the collector thread

    def _collect(self) -> None:
        self._collector.collect(iter(self._played.get, None))

    # --- the learner thread that publishes

    def _tell_dispatcher(self) -> None:
        if all(actor.reads_weights for actor in self._actors):
            return
        if not self._is_told.is_set():
            self._is_told.set()
            self._events.put(self._send_weights)

    # --- the dispatcher thread: everything below

    def _dispatch(self) -> None:
        for actor in self._actors:
            self._places.start(actor)
        polled = time.monotonic()
        while not self._places.closed.is_set():
            left = polled + _POLL_S - time.monotonic()
            if left <= 0:
                self._poll()
                polled, left = time.monotonic(), _POLL_S
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                continue
            if event is not None:
                event()

    def _begin(self, actor: _Actor) -> None:
        """Asks for a worker in an actor's place."""
        actor.begin(self._fleet.worker(actor.full_name))
        self._call(actor, self._placed, "place")
        arguments = self._arguments_of(actor)
        self._call(actor, self._started, "start", arguments, *self._newest(actor))

    def _call(
        self,
        actor: _Actor,
        then: Callable[[_Actor, Any], None],
        method: str,
        *arguments: Any,
    ) -> None:
        """Calls a method of the actor's worker; `then` gets the result in this thread.

        A worker that is lost, or a failure, is dealt with here; the results of replaced workers are
        dropped.
        """
        incarnation = actor.incarnation

        def answered(result: Any) -> None:
            if actor.incarnation != incarnation or self._places.closed.is_set():
                return
            if isinstance(result, WorkerLost):
                self._lost(actor, self._fleet.explain(result, actor.place))
            elif isinstance(result, (Failed, RunError)):
                self._supervisor.fail(actor.name, _error_of(result))
            else:
                then(actor, result)

        assert actor.worker is not None
        actor.worker.call(
            lambda result: self._events.put(functools.partial(answered, result)),
            method,
            *arguments,
        )

    def _placed(self, actor: _Actor, place: Place) -> None:
        actor.place = place
        actor.since = time.monotonic()
        _log.info("%s is process %d on %s", actor.full_name, place.pid, place.host)

    def _started(self, actor: _Actor, started: Started) -> None:
        actor.is_alive = True
        actor.reads_weights = started.reads_weights
        actor.report(started.activity)
        self._fill(actor)
        self._send_to(actor)

    def _fill(self, actor: _Actor) -> None:
        """Lets an actor play as many rollouts as there is room for."""
        while actor.is_alive and actor.in_flight < self._config.fleet.slots_per_process():
            index = actor.next_rollout()
            self._call(actor, functools.partial(self._has_played, index), "play", index)
            self._send_to(actor)

    def _has_played(self, index: int, actor: _Actor, played: Played | None) -> None:
        if played is None:  # it was asked to end
            return
        self._places.works(actor)
        actor.report(played.activity)
        for arrays in actor.in_order(index, played.arrays):
            release = functools.partial(self._events.put, functools.partial(self._free, actor))
            self._played.put(Written(arrays, actor.num_envs, release))

    def _free(self, actor: _Actor) -> None:
        """A rollout of the actor was copied into a batch."""
        actor.in_flight -= 1
        self._fill(actor)

    # weights

    def _send_weights(self) -> None:
        self._is_told.clear()  # before they are read: newer ones are told again
        for actor in self._actors:
            self._send_to(actor)

    def _send_to(self, actor: _Actor) -> None:
        """Sends the newest weights to an actor, unless it still fetches earlier ones, or reads them
        by itself.
        """
        wants = actor.is_playing and actor.version != self._weights.version
        if wants and not actor.fetches and not actor.reads_weights:
            actor.fetches = True
            self._call(actor, self._has_loaded, "load", *self._newest(actor))

    def _has_loaded(self, actor: _Actor, _: None) -> None:
        actor.fetches = False
        self._send_to(actor)

    def _newest(self, actor: _Actor) -> tuple[int, list[Any]]:
        """Returns the newest version and a reference to its weights, which are stored once."""
        if self._stored is None or self._stored[0] != self._weights.version:
            version, weights = self._weights.newest
            self._stored = version, self._fleet.put(weights)
        actor.version, reference = self._stored
        return actor.version, [reference]

    # what workers do

    def _poll(self) -> None:
        for actor in self._actors:
            stage, seconds = actor.present()
            if stage in DOING and seconds >= HANG_S:
                why = f"was given up after {seconds:.0f} s {DOING[stage]}"
                self._lost(actor, WorkerLost(why))
            elif actor.is_alive and not actor.is_asked:
                actor.is_asked = True
                self._call(actor, _Actor.answer, "activity")

    # ends

    def _lost(self, actor: _Actor, error: WorkerLost) -> None:
        """Replaces a worker, or fails the run.

        The worker is ended: one that hangs, or that is out of reach, still has its environments.
        """
        assert actor.worker is not None
        actor.worker.kill()
        deal = self._places.replace if error.has_left else self._places.ended
        deal(actor, error)

    def _arguments_of(self, actor: _Actor) -> dict[str, Any]:
        """Returns the arguments of an actor's worker."""
        config = self._config
        return {
            "env": config.env.as_json(),
            "actor": config.actor.as_json(),
            "precision": config.precision,
            "unroll_length": config.rollouts.unroll_length,
            "extras": config.extras,
            "mode": config.mode,
            "num_envs": actor.num_envs,
            "first_env": actor.first_env,
            "seed": seed_of(config.seed, "actor", actor.index, actor.incarnation),
            "ring": address_of(self._weights.ring, self._fleet.own_node),
        }


class _Actor:
    """A place for one worker after the other. The dispatcher writes, other threads read."""

    def __init__(self, index: int, envs: tuple[int, int], begin: Callable[[_Actor], None]) -> None:
        """envs: their number, and the number of the first one. begin: asks for a worker."""
        self.index = index
        self._begin = begin
        self.num_envs, self.first_env = envs
        self.name = f"actor {index}"
        self.deaths = Deaths()
        self.incarnation = 0
        self.worker: Worker | None = None
        self.in_flight = 0  # rollouts that are played, or not yet copied into a batch
        self._next_rollout = 0
        self._before: list[ActivityReport] = []  # the last reports of workers that were lost
        self._forget()

    def _forget(self) -> None:
        self.is_alive = False  # and has started
        self.place: Place | None = None
        self.version = -1  # of the newest weights that were sent
        self.reads_weights = False  # from the learner's memory
        self.fetches = False  # weights
        self.is_asked = False  # what it does
        self.since = time.monotonic()
        self._unfinished: collections.deque[int] = collections.deque()  # rollouts, in order
        self._early: dict[int, Any] = {}  # arrived before those sent earlier
        self._report: tuple[float, ActivityReport] | None = None

    @property
    def full_name(self) -> str:
        """The name in Ray's dashboard: no two workers share one."""
        return f"{self.name}.{self.incarnation}" if self.incarnation else self.name

    def start(self) -> None:
        """Asks for a worker: the first one, or one that replaces another."""
        if self.worker is not None:
            self._forget_worker()
        self._begin(self)

    def begin(self, worker: Worker) -> None:
        """A worker was asked for."""
        self.worker = worker
        self.since = time.monotonic()

    def _forget_worker(self) -> None:
        """The worker is gone, with what it was playing."""
        self.in_flight -= len(self._unfinished)
        if self._report is not None:
            self._before.append(self._report[1])
        self._next_rollout += 1  # the successor's rollouts do not continue these
        self.incarnation += 1
        self._forget()

    @property
    def is_playing(self) -> bool:
        """Whether it has rollouts to play; one that waits for room needs no newer weights yet."""
        return self.is_alive and bool(self._unfinished)

    def next_rollout(self) -> int:
        """Numbers a rollout that is about to be played."""
        index = self._next_rollout
        self._next_rollout += 1
        self.in_flight += 1
        self._unfinished.append(index)
        return index

    def in_order(self, index: int, arrays: Any) -> Iterator[Any]:
        """Yields the rollouts that can be used now that this one has arrived."""
        self._early[index] = arrays
        while self._unfinished and self._unfinished[0] in self._early:
            yield self._early.pop(self._unfinished.popleft())

    def report(self, activity: ActivityReport) -> None:
        """The worker told what it does; answers of two lanes may arrive out of order."""
        if self._report is None or activity.steps >= self._report[1].steps:
            self._report = time.monotonic(), activity

    def answer(self, activity: ActivityReport) -> None:
        """The worker was asked what it does."""
        self.is_asked = False
        self.report(activity)

    def present(self) -> tuple[str, float]:
        """Returns the current stage, and seconds since it began.

        One that does not answer is still in the stage that it was in.
        """
        now = time.monotonic()
        if self._report is None:
            return ("starting" if self.place else _WAITING_FOR_ROOM), now - self.since
        told, activity = self._report
        return activity.stage, activity.seconds_in_stage + now - told

    def seconds(self) -> dict[str, float]:
        """Returns the seconds per stage of all workers in this place."""
        total: collections.Counter[str] = collections.Counter()
        for activity in self._reports():
            total.update(activity.seconds)
        return dict(total)

    def steps(self) -> int:
        """Returns the steps of all workers in this place."""
        return sum(activity.steps for activity in self._reports())

    def _reports(self) -> list[ActivityReport]:
        last = self._report
        return [*self._before, *([] if last is None else [last[1]])]


def _error_of(result: Failed | RunError) -> Exception:
    if isinstance(result, RunError):
        return result
    return UsageError(result.error) if result.usage else RunError(result.error)
