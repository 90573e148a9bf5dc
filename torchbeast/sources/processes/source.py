# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's source: actor processes -> rollouts in shared memory -> batches. Python only.

    actor 0 [env x E, model] ---+                       +--> batches() --> the learner
    actor 1 [env x E, model] ---+-- slots -- collector -+
         ^                      |   (shared memory)     the batch in preparation
         +-- weights, grants ---+

A slot is granted to one actor process, which writes a rollout of all its environments into it and
reports it. The collector thread copies its columns into the batch in preparation and grants the
slot again. This module alone decides which process acts when, and with which weights.

By default the learner takes rollouts in the order of their completion, and every action is chosen
with the newest weights. With a fixed lag of K it takes the rollouts of the processes in turn. The
slot of a rollout is granted once the weights exist that will be K updates old in its update, so the
run is reproducible however fast its processes are. On demand, every process gets a slot when the
learner asks for the next batch, and acts with the weights of then.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.registry import Agent
from torchbeast.core.checks import require
from torchbeast.core.specs import ActorSpec, Precision
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.child_process import ChildProcess, end_all
from torchbeast.processes.places import Deaths, Places
from torchbeast.processes.supervisor import Supervisor
from torchbeast.seeds import seed_of
from torchbeast.sources.config import RolloutConfig, split_evenly
from torchbeast.sources.contract import ACTOR_STAGES, WAIT_S, Away
from torchbeast.sources.processes.activity import DOING, HANG_S, Activity, SharedActivities
from torchbeast.sources.processes.collector import Collector, Written
from torchbeast.sources.processes.config import ProcessesConfig
from torchbeast.sources.processes.rollout_buffers import Batch, SharedRollouts, slot_bytes
from torchbeast.sources.processes.shared_weights import SharedWeights

_log = logging.getLogger("torchbeast.mono")

_HANG_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class MonoSourceConfig:
    """Settings of the collection of rollouts."""

    env: EnvSpec
    actor: ActorSpec  # every process makes its own copy of the network
    precision: Precision  # of the actors' features, on the CPU
    processes: ProcessesConfig  # with a fixed lag whole rollouts must fill a batch
    rollouts: RolloutConfig
    extras: tuple[str, ...]  # names of the outputs of acting to put into rollouts
    mode: Mode  # in which actions are chosen
    num_batches: int = 2  # one in preparation, the others used by learner threads
    spare_columns: int = 0  # of a batch, after the rollouts: left to who takes it
    # Collect nothing before a batch is asked for; one thread asks. Needs a fixed lag of 0, and a
    # batch of all environments.
    on_demand: bool = False
    seed: int

    def __post_init__(self) -> None:
        wanted, given = self.processes.environments(), self.rollouts.batch_size
        require(
            not self.on_demand or (self.processes.fixed_lag == 0 and given == wanted),
            f"rollouts on demand need fixed_lag 0 and a batch_size of num_actors {wanted}, got "
            f"fixed_lag {self.processes.fixed_lag} and batch_size {given}",
        )


def ring_size(fixed_lag: int | None) -> int:
    """Returns the number of versions of the weights that shared memory must hold."""
    return 4 if fixed_lag is None else fixed_lag + 2


class MonoSource:
    """Yields batches of rollouts from actor processes of this machine.

    Threads: `start` adds two to the supervisor, the collector and one that ends hanging processes;
    every process has threads that watch it. When the run ends, the supervisor closes the source,
    which wakes every waiting thread; `end` ends the processes. `batches` may be iterated from
    several threads, each with its own iterator. A batch shares memory with the source and is valid
    until its iterator advances or ends.
    """

    yields = Rollout

    def __init__(
        self,
        agent: Agent,
        weights: SharedWeights,
        device: torch.device,
        config: MonoSourceConfig,
    ) -> None:
        """Allocates buffers and shared memory.

        device: the learner's; batches for a GPU are in pinned memory.
        """
        self._config = config
        self._batch_size = config.rollouts.batch_size
        self._fixed_lag = config.processes.fixed_lag
        self._weights = weights
        self._done: queue.Queue[tuple[_Actor, int] | None] = queue.Queue()
        self.granting = threading.Lock()  # held by who grants slots
        self._places = Places(_log)
        length, keywords = config.rollouts.unroll_length, config.env.options.info_keywords
        spec, pin = RolloutSpec(agent, config.extras, length, keywords), device.type == "cuda"
        processes, num_processes = config.processes, config.processes.processes()
        num_batches = config.num_batches + processes.batches_ahead(self._batch_size)
        self._rollout_bytes = slot_bytes(spec, processes.environments())
        self._collector = Collector(
            Batch(spec, self._batch_size, pin, config.spare_columns) for _ in range(num_batches)
        )
        counts = split_evenly(processes.environments(), num_processes)
        self._activities = SharedActivities(num_processes)
        first_envs = [0, *itertools.accumulate(counts)]
        self._actors = [
            _Actor(
                index,
                self,
                SharedRollouts(spec, count, processes.slots_per_process()),
                self._activities.of(index),
                first_envs[index],
            )
            for index, count in enumerate(counts)
        ]
        self._grants = _grants(config, weights.version, counts[0])
        self._is_asked = False  # for a batch that was not taken yet

    @property
    def pids(self) -> list[int]:
        """Ids of the actor processes."""
        return [actor.pid for actor in self._actors]

    @property
    def num_bytes(self) -> int:
        """Bytes of the batches, of the slots without their final observations, of the weights."""
        slots = self._config.processes.slots_per_process() * self._rollout_bytes
        return self._collector.num_bytes + slots + self._weights.num_bytes

    def start(self, supervisor: Supervisor) -> None:
        """Starts the actor processes and the threads that collect from them."""
        self._places.supervisor = supervisor
        supervisor.on_close(self.close)
        self._weights.on_publish = self._published
        for actor in self._actors:
            self._places.start(actor)
            for slot in range(len(actor.rollouts.slots)):
                self._grants.add(actor, slot)
        self._published(self._weights.version)
        supervisor.start_thread("collector", self._collect)
        supervisor.start_thread("hangs", self._watch_actors)

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts `[T+1, batch_size + spare_columns, ...]` on the CPU, until the source is
        closed. Spare columns hold whatever the memory held.
        """
        batches = self._collector.batches()
        return self._on_demand(batches) if self._config.on_demand else batches

    def _on_demand(self, batches: Iterator[Rollout]) -> Iterator[Rollout]:
        """Yields batches, each of which is collected when it is asked for."""
        with contextlib.closing(batches):  # type: ignore[type-var]
            while True:
                self._ask()
                batch = next(batches, None)
                if batch is None:
                    return
                self._is_asked = False
                yield batch

    def _ask(self) -> None:
        """Has a rollout of every process written, unless one was asked for in vain."""
        if self._is_asked:
            return
        self._is_asked = True
        assert isinstance(self._grants, _AskedGrants)
        with self.granting:
            self._grants.send_asked(self._weights.version)

    def close(self) -> None:
        """Wakes every waiting thread and asks the processes to end. May be called again."""
        self._places.close()
        self._collector.close()
        self._done.put(None)
        for actor in self._actors:
            actor.ask_to_end()

    def end(self) -> None:
        """Ends the actor processes; kills those that do not end by themselves."""
        end_all(actor.process for actor in self._actors if actor.process is not None)

    def status(self) -> dict[str, int]:
        """Returns queue lengths and counts, by the names of log columns.

        Now: rollouts that wait for the learner and for the collector, actor processes, those that
        wait for a grant. Since the start: replaced processes and collected steps.
        """
        stages = [actor.activity.present()[0] for actor in self._living()]
        return {
            "learner_queue_size": len(self._collector) * self._batch_size,
            "rollout_queue_size": self._done.qsize(),
            "live_actors": len(stages),
            "waiting_actors": stages.count("queueing"),
            "replaced_actors": self._places.replaced,
            "collected_steps": sum(actor.activity.steps() for actor in self._actors),
        }

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all actor processes have spent since the start, by stage."""
        each = [actor.activity.seconds() for actor in self._actors]
        return {stage: sum(seconds[stage] for seconds in each) for stage in ACTOR_STAGES}

    def hanging(self) -> str:
        """Describes the actor processes that have been in one stage for over WAIT_S."""
        said = [
            f"{actor.name} has been {DOING[stage]} for {seconds:.0f} s"
            for actor, stage, seconds in self._busy()
            if seconds >= WAIT_S
        ]
        if said and self._fixed_lag is not None:
            said.append("with a fixed lag the others wait for its turn")
        return "; ".join(said)

    def away(self) -> list[Away]:
        """Returns []: an actor process that dies is replaced at once."""
        return []

    def _busy(self) -> list[tuple[_Actor, str, float]]:
        """Returns the stage of each living actor that waits for no grant, and seconds in it."""
        each = [(actor, *actor.activity.present()) for actor in self._living()]
        return [(actor, stage, time) for actor, stage, time in each if stage in DOING]

    def _living(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.alive]

    def _watch_actors(self) -> None:
        while not self._places.closed.wait(_HANG_POLL_S):
            self._give_up_hanging_actors()

    def _give_up_hanging_actors(self) -> None:
        """Kills processes that hang; they are replaced like others that die."""
        for actor, stage, seconds in self._busy():
            if seconds >= HANG_S:
                actor.give_up(f"was given up after {seconds:.0f} s {DOING[stage]}")

    # --- called by the threads that watch the actors

    def report(self, actor: _Actor, slot: int) -> None:
        """Passes a written rollout to the collector."""
        self._places.works(actor)
        self._done.put((actor, slot))

    def actor_ended(self, actor: _Actor, error: Exception) -> None:
        """Replaces an actor's process, or fails the run."""
        self._places.ended(actor, error)

    def arguments_of(self, actor: _Actor) -> dict[str, Any]:
        """Returns the arguments of an actor's process."""
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
        self._collector.collect(itertools.starmap(self._written, self._rollouts()))

    def _written(self, actor: _Actor, slot: int) -> Written:
        release = functools.partial(self._grant_again, actor, slot)
        return Written(actor.rollouts.slots[slot], actor.num_envs, release)

    def _rollouts(self) -> Iterator[tuple[_Actor, int]]:
        """Yields actor and slot of each rollout, in the order in which they are learnt."""
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
        with self.granting:
            self._grants.add(actor, slot)
            self._grants.send_ready(self._weights.version)

    def _published(self, version: int) -> None:
        with self.granting:
            self._grants.send_ready(version)


class _Actor:
    """The place of one actor process: its slots, grants and current process."""

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
        self._granted: dict[int, int | None] = {}  # slot -> version, until the slot is reported
        self._next_rollout = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Starts a process; one that replaces another repeats its unfinished grants."""
        with self._source.granting:
            if self.process is not None:
                self.incarnation += 1
                self._next_rollout += 1  # marks a gap: new episodes begin
            self._start_process()
            for slot, version in list(self._granted.items()):
                self._send(slot, version)

    def _start_process(self) -> None:
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
            environment={
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),  # it imports what a script beside it can
            },
        )

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
    """Grants every free slot at once, to be written with the newest weights."""

    def __init__(self) -> None:
        self._slots: list[tuple[_Actor, int]] = []

    def add(self, actor: _Actor, slot: int) -> None:
        self._slots.append((actor, slot))

    def send_ready(self, version: int) -> None:
        slots, self._slots = self._slots, []
        for actor, slot in slots:
            actor.grant(slot, None)


class _AskedGrants:
    """Grants a slot of every process when a batch is asked for."""

    def __init__(self) -> None:
        self._slots: dict[int, collections.deque[tuple[_Actor, int]]] = collections.defaultdict(
            collections.deque
        )

    def add(self, actor: _Actor, slot: int) -> None:
        self._slots[actor.index].append((actor, slot))

    def send_ready(self, version: int) -> None:
        """Does nothing: weights alone are no reason to collect."""

    def send_asked(self, version: int) -> None:
        for slots in self._slots.values():
            actor, slot = slots.popleft()
            actor.grant(slot, version)


class _LaggedGrants:
    """Grants a slot once the weights exist that will be `lag` updates old in its update.

    Rollouts are numbered in turn over the processes: number i is learnt in update i * E // B.
    """

    def __init__(self, config: MonoSourceConfig, version: int, num_envs: int) -> None:
        assert config.processes.fixed_lag is not None
        self._lag = config.processes.fixed_lag
        self._first_version = version
        self._rollouts_per_batch = config.rollouts.batch_size // num_envs
        self._num_processes = config.processes.processes()
        self._given: dict[int, int] = collections.Counter()  # number of grants of each actor
        self._slots: dict[int, collections.deque[tuple[_Actor, int]]] = collections.defaultdict(
            collections.deque
        )

    def add(self, actor: _Actor, slot: int) -> None:
        self._slots[actor.index].append((actor, slot))

    def send_ready(self, version: int) -> None:
        for index, slots in self._slots.items():
            while slots and self._wanted(index) <= version:
                actor, slot = slots.popleft()
                actor.grant(slot, self._wanted(index))
                self._given[index] += 1

    def _wanted(self, index: int) -> int:
        """Returns the version of the weights for the actor's next rollout."""
        rollout = self._given[index] * self._num_processes + index
        update = self._first_version + rollout // self._rollouts_per_batch
        return max(self._first_version, update - self._lag)


def _grants(
    config: MonoSourceConfig, version: int, num_envs: int
) -> _FreeGrants | _LaggedGrants | _AskedGrants:
    if config.on_demand:
        return _AskedGrants()
    if config.processes.fixed_lag is None:
        return _FreeGrants()
    return _LaggedGrants(config, version, num_envs)
