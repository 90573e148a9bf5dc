# SPDX-License-Identifier: Apache-2.0
"""The source that plays in the learner's own process, when the learner asks for a batch.

    learner thread -- next(batches()) --> Player: E environments, a replica of the network
                                               |  slot [T+1, E, ...]
                                               v
                                          the batch [T+1, B, ...]

Nothing is played ahead: every action is chosen with the newest weights.
"""

from __future__ import annotations

import copy
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchbeast.collect.contract import ACTOR_STAGES, CollectionPlan, LearnerInfo, LostStream
from torchbeast.collect.rollout_buffers import (
    BatchBuffer,
    RolloutArrays,
    SlotWriter,
    batch_buffers,
    slot_bytes,
    slot_fields,
)
from torchbeast.collect.worker import Player, StageClock
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.base.computing import one_thread
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.contract import give_options
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.storages.rollout import Rollout
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, what_it_raised
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import WAIT_S
from torchbeast.seeds import seed_of


class LocalSource:
    """Yields batches of rollouts, which the calling thread collects itself.

    Threads: it starts no thread. If several threads ask for batches, one plays at a time. A batch
    shares memory with the source and is valid until its iterator advances or ends.

    After every step the source calls the learner's `stops_early` with the share of the batch that
    is collected. If it returns True, the batch ends there: the remaining steps are marked as not
    valid, their rows repeat the last one, and the next batch continues from that step.

    If an environment raises an exception, the run fails. An exception from outside, such as
    KeyboardInterrupt in a notebook, only drops the unfinished rollout: the next batch starts new
    episodes with new seeds.
    """

    def __init__(
        self, learner: LearnerInfo, make_env: Callable[[int], VecEnv], num_envs: int
    ) -> None:
        """Allocates buffers. The environments are made with the first batch.

        make_env: makes the given number of environments.
        """
        self._learner, self._make_env, self._num_envs = learner, make_env, num_envs
        self._stops = learner.stops_early
        rollouts = learner.rollouts
        self._free: queue.SimpleQueue[BatchBuffer | None] = queue.SimpleQueue()
        self.num_bytes = slot_bytes(rollouts, num_envs)
        for batch in batch_buffers(learner, learner.batches_at_once):
            self.num_bytes += batch.num_bytes
            self._free.put(batch)
        self._closed = threading.Event()
        self._actor = copy.deepcopy(rollouts.agent.model).to("cpu")
        self._actor.set_precision(learner.precision, torch.device("cpu"))
        self._stage_clock = StageClock()
        self._slot: RolloutArrays = map_leaves(
            lambda spec: np.empty(spec.shape, spec.dtype), slot_fields(rollouts, num_envs)
        )
        self._length = 0  # steps of the rollout that is in the slot
        self._taken = num_envs  # columns of the slot that batches have taken
        self._env: VecEnv | None = None
        self._incarnation = 0
        self._next_rollout = 0
        self._options: Mapping[str, Any] | None = None
        self._lock = threading.Lock()  # held while a thread plays

    def start(self, supervisor: Supervisor) -> None:
        """Lets `batches` play."""
        self._supervisor = supervisor
        supervisor.on_close(self.close)

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts `[T+1, batch_size + spare_columns, ...]` on the CPU, until the source is
        closed. Spare columns hold whatever the memory held.
        """
        while (batch := self._free.get()) is not None:
            try:
                lengths = self._fill(batch)
                if lengths is None:
                    return
                yield _masked(batch.rollout(), lengths)
            finally:  # also if the iterator is abandoned
                batch.clear()
                self._free.put(batch)
        self._free.put(None)  # for the next thread

    def close(self) -> None:
        """Ends the current rollout and wakes every waiting thread. May be called again."""
        self._closed.set()
        self._free.put(None)

    def end(self) -> None:
        """Closes the environments."""
        with self._lock:
            self._forget()

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives the environments options, now or when they are made."""
        self._options = options
        if self._env is not None:
            give_options(self._env, options)

    def status(self) -> dict[str, int]:
        """Returns counts by the names of log columns. Rollouts never wait for the learner here."""
        steps = self._stage_clock.report().steps
        return {"learner_queue_size": 0, "live_workers": 1, "collected_steps": steps}

    def seconds(self) -> dict[str, float]:
        """Returns the seconds since the start by stage; queueing: while nobody asks for a batch."""
        seconds = self._stage_clock.report().seconds
        return {stage: seconds[stage] for stage in ACTOR_STAGES}

    def hanging(self) -> str:
        """Describes a step of the environments that has taken over WAIT_S."""
        stage, seconds, *_ = self._stage_clock.report()
        if stage != "environment" or seconds < WAIT_S:
            return ""
        return f"the environments have been in one step for {seconds:.0f} s"

    def lost_streams(self) -> list[LostStream]:
        """Returns []: there are no streams."""
        return []

    def _fill(self, batch: BatchBuffer) -> list[int] | None:
        """Plays a whole batch and returns the number of steps of each column; None if the source is
        closed or fails before that.
        """
        with self._lock:
            try:
                with one_thread():  # a row is small, so more threads would mostly wait
                    return self._played(batch)
            except Exception as error:
                is_ours = isinstance(error, (UsageError, RunError))
                failure = error if is_ours else RunError(what_it_raised(error))
                self._supervisor.fail("environments", failure)
                return None
            except BaseException:
                self._forget()
                raise

    def _played(self, batch: BatchBuffer) -> list[int] | None:
        lengths: list[int] = []
        while batch.missing:
            if self._taken == self._num_envs:
                self._play(functools.partial(self._goes_on, lengths))
            if self._closed.is_set():
                return None
            count = min(batch.missing, self._num_envs - self._taken)
            batch.add(self._slot, self._taken, count)
            self._taken += count
            lengths += [self._length] * count
        return lengths

    def _goes_on(self, lengths: list[int], t: int) -> bool:
        """Returns whether to continue after t steps; lengths: of the columns that the batch has."""
        if self._stops is None or self._closed.is_set():
            return not self._closed.is_set()
        batch_size, length = self._learner.batch_size, self._learner.rollouts.unroll_length
        missing = min(batch_size - len(lengths), self._num_envs)
        collected = sum(lengths) + missing * t
        return collected == 0 or not self._stops(collected / (batch_size * length))

    def _forget(self) -> None:
        """Closes the environments; the next rollout starts new episodes in new environments."""
        env, self._env = self._env, None
        self._incarnation += 1
        self._next_rollout += 1  # marks a gap
        self._taken = self._num_envs
        if env is not None:
            env.close()

    def _play(self, goes_on: Callable[[int], bool]) -> None:
        if self._env is None:
            self._open()
        writer = SlotWriter(self._slot, self._loop.acted.state, 0, self._next_rollout)
        self._length = self._player.play(writer, None, goes_on)
        self._next_rollout += 1
        self._taken = 0

    def _open(self) -> None:
        learner = self._learner
        self._env = self._make_env(self._num_envs)
        if self._options is not None:
            give_options(self._env, self._options)
        seed = seed_of(seed_of(learner.seed, "actor", 0, self._incarnation), "environments")
        self._loop = EnvLoop(self._env, self._actor, seed)
        weights, mode = learner.weights, learner.mode
        self._player = Player(self._loop, weights, self._stage_clock, mode)


def _masked(rollout: Rollout, lengths: list[int]) -> Rollout:
    """Returns the rollout with steps that were not played marked as not valid.

    lengths: the number of steps of each column.
    """
    if min(lengths) == rollout.unroll_length:
        return rollout
    rows = torch.arange(rollout.unroll_length + 1, device="cpu")
    valid = rows[:, None] <= torch.tensor(lengths, device="cpu")
    return rollout.keeping(valid)


@dataclass(frozen=True, kw_only=True)
class LocalCollection(CollectionPlan):
    """Collects in the learner's process."""

    make_env: Callable[[int], VecEnv]

    plays_ahead = False

    def source(self, learner: LearnerInfo, env: EnvSpec, ending: ExitStack) -> LocalSource:
        """Makes the source; `ending` closes its environments."""
        source = LocalSource(learner, self.make_env, self.num_envs)
        ending.callback(source.end)
        return source
