# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's source: actor processes -> rollouts in shared memory -> batches. Python only.

    actor 0 [env x E, model] ---+                       +--> batches() --> the learner
    actor 1 [env x E, model] ---+-- slots -- collector -+
         ^                      |   (shared memory)     the batch in preparation
         +-- weights, grants ---+

A slot is granted to one actor, which writes a rollout of all its environments into it and says so.
The collector thread copies its columns into the batch in preparation and grants it again. All that
decides who acts when and with which weights is here; actors only do what they are granted.

Free-running (the default), rollouts are learnt in the order in which they are done, each acted with
the newest weights at each step. With a fixed lag of K they are learnt in turn, and each is granted
once the weights exist that will be K updates old when it is learnt: the run is the same on every
machine, however fast its actors are.
"""

from __future__ import annotations

import collections
import itertools
import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import Mode
from torchbeast.core.choices import Precision
from torchbeast.core.envs.spaces import ObservationSpace
from torchbeast.core.specs import ActorSpec
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.child_process import ChildProcess, Deaths, ProcessDied, end_all
from torchbeast.processes.supervisor import Supervisor
from torchbeast.seeds import seed_of
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.contract import ACTOR_STAGES, STALL_S, Away
from torchbeast.sources.processes.activity import Activity, SharedActivities
from torchbeast.sources.processes.config import ProcessesConfig
from torchbeast.sources.processes.rollout_buffers import Batch, SharedRollouts
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.spread import split_evenly

_log = logging.getLogger("torchbeast.mono")

_HANG_S = 600.0  # in one step of an environment, as long as PolyBeast waits for one
_HANG_POLL_S = 1.0
_DOING = {
    "environment": "in one step of its environments",
    "inference": "choosing one action",
    "starting": "starting",
}


@dataclass(frozen=True, kw_only=True)
class MonoSourceConfig:
    """How rollouts are collected."""

    env: EnvSpec
    actor: ActorSpec  # from which every process makes its own copy of the network
    precision: Precision  # of the actors' features, on the CPU
    processes: ProcessesConfig  # a fixed lag: whole rollouts must fill a batch
    rollouts: RolloutConfig
    extras: tuple[str, ...]  # of acting, that travel in the rollouts: what the algorithm needs
    mode: Mode  # of acting
    num_batches: int = 2  # beside the buffers: one in preparation, the others with learner threads
    seed: int


def ring_size(fixed_lag: int | None) -> int:
    """Versions of the weights that must lie in shared memory."""
    return 4 if fixed_lag is None else fixed_lag + 2


class MonoSource:
    """Batches of rollouts from actor processes of this machine.

    Threads: `start` adds the collector, and one that gives up actors that hang, to the supervisor;
    every actor has threads that watch its process. The supervisor's end closes the source, which
    wakes everyone; `end` ends the processes. `batches` may be iterated from several threads, each
    with its own iterator. A batch shares its memory with the source: it ends when its iterator goes
    on, or ends.
    """

    yields = Rollout

    def __init__(
        self,
        agent: Agent,
        observation_space: ObservationSpace,
        weights: SharedWeights,
        device: torch.device,
        config: MonoSourceConfig,
    ) -> None:
        """`observation_space`: of one environment, as the policy sees it."""
        self._config = config
        self._batch_size = config.rollouts.batch_size
        self._fixed_lag = config.processes.fixed_lag
        self._weights = weights
        self._ready: queue.Queue[Batch | None] = queue.Queue()
        self._free: queue.Queue[Batch | None] = queue.Queue()
        self._done: queue.Queue[tuple[_Actor, int] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._replaced = 0
        self._any_has_worked = False
        self._closed = threading.Event()
        shape = agent.model, observation_space, config.extras, config.rollouts.unroll_length
        processes, num_processes = config.processes, config.processes.processes()
        pin = device.type == "cuda"
        for _ in range(config.num_batches + processes.batches_ahead(self._batch_size)):
            self._free.put(Batch(*shape, self._batch_size, pin))
        counts = split_evenly(processes.num_actors, num_processes)
        self._activities = SharedActivities(num_processes)
        first_envs = [0, *itertools.accumulate(counts)]
        self._actors = [
            _Actor(
                index,
                self,
                SharedRollouts(*shape, count, processes.slots_per_process()),
                self._activities.of(index),
                first_envs[index],
            )
            for index, count in enumerate(counts)
        ]
        self._grants = _grants(config, weights.version, counts[0])
        self._supervisor: Supervisor | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the actors."""
        return [actor.pid for actor in self._actors]

    def start(self, supervisor: Supervisor) -> None:
        """Begins to collect."""
        self._supervisor = supervisor
        supervisor.on_close(self.close)
        self._weights.on_publish = self._published
        for actor in self._actors:
            actor.start()
            for slot in range(len(actor.rollouts.slots)):
                self._grants.add(actor, slot)
        self._published(self._weights.version)
        supervisor.start_thread("collector", self._collect)
        supervisor.start_thread("hangs", self._watch_actors)

    def batches(self) -> Iterator[Rollout]:
        """Rollouts `[T+1, batch_size, ...]` on the CPU, until the source is closed."""
        while (batch := self._ready.get()) is not None:
            try:
                yield batch.rollout()
            finally:  # also where the iterator is left for good
                batch.clear()
                self._free.put(batch)
        self._ready.put(None)  # for the next thread

    def close(self) -> None:
        """Ends everything that waits here, and asks the actors to end. May be called again."""
        with self._lock:
            self._closed.set()  # no actor is replaced any more
        for waited_for in (self._ready, self._free, self._done):
            waited_for.put(None)
        for actor in self._actors:
            actor.ask_to_end()

    def end(self) -> None:
        """Ends the actor processes, by force when it must be."""
        end_all(actor.process for actor in self._actors if actor.process is not None)

    def status(self) -> dict[str, int]:
        """Where data is at this moment: batches for the learner, rollouts for the collector,
        actor processes, those of them that wait for a grant, and how many had to be replaced.
        """
        stages = [actor.activity.present()[0] for actor in self._living()]
        return {
            "learner_queue_size": self._ready.qsize() * self._batch_size,
            "rollout_queue_size": self._done.qsize(),
            "live_actors": len(stages),
            "waiting_actors": stages.count("queueing"),
            "replaced_actors": self._replaced,
            "collected_steps": sum(actor.activity.steps() for actor in self._actors),
        }

    def seconds(self) -> dict[str, float]:
        """What all actors together have spent their time on, since the start."""
        each = [actor.activity.seconds() for actor in self._actors]
        return {stage: sum(seconds[stage] for seconds in each) for stage in ACTOR_STAGES}

    def hanging(self) -> str:
        """Names the actors that do one thing for a minute and more."""
        said = [
            f"{actor.name} has been {_DOING[stage]} for {seconds:.0f} s"
            for actor, stage, seconds in self._busy()
            if seconds >= STALL_S
        ]
        if said and self._fixed_lag is not None:
            said.append("with a fixed lag the others wait for its turn")
        return "; ".join(said)

    def away(self) -> list[Away]:
        """Nothing: an actor that died is replaced at once."""
        return []

    def _busy(self) -> list[tuple[_Actor, str, float]]:
        """What each living actor does and since when, without those that wait for a grant."""
        each = [(actor, *actor.activity.present()) for actor in self._living()]
        return [(actor, stage, time) for actor, stage, time in each if stage in _DOING]

    def _living(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.alive]

    def _watch_actors(self) -> None:
        while not self._closed.wait(_HANG_POLL_S):
            self._give_up_those_that_hang()

    def _give_up_those_that_hang(self) -> None:
        """Their ends are those of actors that were killed."""
        for actor, stage, seconds in self._busy():
            if seconds >= _HANG_S:
                actor.give_up(f"was given up after {seconds:.0f} s {_DOING[stage]}")

    # --- called by the threads that watch the actors

    def report(self, actor: _Actor, slot: int) -> None:
        """An actor has written a rollout."""
        self._any_has_worked = True
        self._done.put((actor, slot))

    def actor_ended(self, actor: _Actor, error: Exception) -> None:
        """One that died is replaced, but not again and again, and not before some actor has
        worked: until then all of them may die of one cause. Any other end is the run's failure.
        """
        assert self._supervisor is not None
        if not isinstance(error, ProcessDied) or not self._any_has_worked:
            self._supervisor.fail(actor.name, error)
            return
        if failure := actor.deaths.too_many(error):
            self._supervisor.fail(actor.name, failure)
            return
        try:
            self._replace(actor, error)
        except OSError as problem:  # no process can be started
            self._supervisor.fail(actor.name, problem)

    def _replace(self, actor: _Actor, error: Exception) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            _log.warning("%s: %s; another takes its place", actor.name, error)
            self._replaced += 1
            actor.restart()

    def arguments_of(self, actor: _Actor) -> dict[str, Any]:
        """What the actor's process is told at its start."""
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
            "num_slots": len(actor.rollouts.slots),
            "rollouts": actor.rollouts.descriptor,
            "weights": self._weights.descriptor,
            "ring_size": self._weights.size,
            "activities": self._activities.descriptor,
            "num_activities": len(self._actors),
            "index": actor.index,
            "seed": seed_of(config.seed, "actor", actor.index, actor.incarnation),
        }

    # --- the collector thread, and the learner thread that publishes

    def _collect(self) -> None:
        rollouts = self._rollouts()
        actor, slot, first = None, 0, 0
        while (batch := self._free.get()) is not None:
            while batch.missing:
                if actor is None:
                    if (done := next(rollouts, None)) is None:
                        return
                    (actor, slot), first = done, 0
                count = min(batch.missing, actor.num_envs - first)
                batch.add(actor.rollouts.slots[slot], first, count)
                first += count
                if first == actor.num_envs:
                    self._grant_again(actor, slot)
                    actor = None
            self._ready.put(batch)

    def _rollouts(self) -> Iterator[tuple[_Actor, int]]:
        """Actor and slot of each rollout, in the order in which they are learnt."""
        done = iter(self._done.get, None)
        if self._fixed_lag is None:
            yield from done
            return
        waiting: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        turn = 0
        for actor, slot in done:
            waiting[actor.index].append(slot)
            while waiting[turn]:
                yield self._actors[turn], waiting[turn].popleft()
                turn = (turn + 1) % len(self._actors)

    def _grant_again(self, actor: _Actor, slot: int) -> None:
        with self._lock:
            self._grants.add(actor, slot)
            self._grants.send_those_ready(self._weights.version)

    def _published(self, version: int) -> None:
        with self._lock:
            self._grants.send_those_ready(version)


class _Actor:
    """One actor process, its slots, and what it has been granted."""

    def __init__(
        self,
        index: int,
        source: MonoSource,
        rollouts: SharedRollouts,
        activity: Activity,
        first_env: int,
    ) -> None:
        self.index = index
        self.first_env = first_env
        self.name = f"actor {index}"
        self.rollouts, self.activity = rollouts, activity
        self.num_envs = rollouts.num_envs
        self.incarnation = 0
        self.deaths = Deaths()
        self.alive = False
        self.process: ChildProcess | None = None
        self._source = source
        self._granted: dict[int, int | None] = {}  # slot -> version; written but not reported
        self._next_rollout = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        self.activity.start()
        self.alive = True
        arguments = self._source.arguments_of(self)
        self.process = ChildProcess(
            self.name,
            "torchbeast.sources.processes.actor_main",
            arguments,
            on_report=self._report,
            on_end=self._ended,
            pass_fds=[arguments[name] for name in ("rollouts", "weights", "activities")],
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    def restart(self) -> None:
        """Another process in the place of a dead one; it is granted what that had not finished."""
        self.incarnation += 1
        self._next_rollout += 1  # no rollout of its environments goes on from one of those before
        self.start()
        for slot, version in list(self._granted.items()):
            self._send(slot, version)

    def grant(self, slot: int, version: int | None) -> None:
        self._granted[slot] = version
        self._send(slot, version)

    def ask_to_end(self) -> None:
        if self.process is not None:
            self.process.ask_to_end()

    def give_up(self, why: str) -> None:
        if self.process is not None:
            self.process.give_up(why)

    def _send(self, slot: int, version: int | None) -> None:
        assert self.process is not None
        self.process.send({"slot": slot, "rollout": self._next_rollout, "version": version})
        self._next_rollout += 1

    def _report(self, report: dict[str, Any]) -> None:
        self._granted.pop(report["slot"], None)
        self._source.report(self, report["slot"])

    def _ended(self, error: Exception) -> None:
        self.alive = False
        self._source.actor_ended(self, error)


class _FreeGrants:
    """Every free slot may be written at once, with the newest weights."""

    def __init__(self) -> None:
        self._slots: list[tuple[_Actor, int]] = []

    def add(self, actor: _Actor, slot: int) -> None:
        self._slots.append((actor, slot))

    def send_those_ready(self, version: int) -> None:
        slots, self._slots = self._slots, []
        for actor, slot in slots:
            actor.grant(slot, None)


class _LaggedGrants:
    """Rollout i of the run, counted in turn over the actors, is learnt in update i * E // B, and
    is acted with the weights of `lag` updates before that.
    """

    def __init__(self, config: MonoSourceConfig, version: int, num_envs: int) -> None:
        assert config.processes.fixed_lag is not None
        self._lag = config.processes.fixed_lag
        self._first_version = version
        self._rollouts_per_batch = config.rollouts.batch_size // num_envs
        self._num_processes = config.processes.processes()
        self._given: dict[int, int] = collections.Counter()  # rollouts granted to each actor
        self._slots: dict[int, collections.deque[tuple[_Actor, int]]] = collections.defaultdict(
            collections.deque
        )

    def add(self, actor: _Actor, slot: int) -> None:
        self._slots[actor.index].append((actor, slot))

    def send_those_ready(self, version: int) -> None:
        for index, slots in self._slots.items():
            while slots and self._wanted(index) <= version:
                actor, slot = slots.popleft()
                actor.grant(slot, self._wanted(index))
                self._given[index] += 1

    def _wanted(self, index: int) -> int:
        """The version that the actor's next rollout is to be acted with."""
        rollout = self._given[index] * self._num_processes + index
        update = self._first_version + rollout // self._rollouts_per_batch
        return max(self._first_version, update - self._lag)


def _grants(config: MonoSourceConfig, version: int, num_envs: int) -> _FreeGrants | _LaggedGrants:
    if config.processes.fixed_lag is None:
        return _FreeGrants()
    return _LaggedGrants(config, version, num_envs)
