# SPDX-License-Identifier: Apache-2.0
"""Sources that put a replay behind another source, the online source.

MixedSource adds replayed columns to the batches of another source:

    online source --> [ online | spare ] --> replay thread --> [ online | replayed ] --> batches()
                                               ^   |                                        |
                                       windows |   | online columns, once they are learnt   v
                                               replay <-------------------------------- the learner

The online source leaves spare columns in its batches. The replay thread lets the replay write
windows into them, so no data is copied twice. It inserts the online columns only after the learner
has trained on the batch, so that the learner sees new data first.

At most `in_flight` batches are between the online source and their insertion: one in each learner
thread, and one that is being prepared. When batch k is prepared, exactly the batches up to
k - in_flight have been inserted. Sampling therefore does not depend on thread timing, and a run is
reproducible if its online source is.

Recurrent networks walk through episodes, window by window. Each batch in flight has its own set of
walks: batch k continues the walks of batch k - in_flight, from the recurrent states that the update
with that batch computed.

TransitionSource lets the rollouts of another source go through a replay, and yields transitions:

    online source --> rollouts --> replay thread --> [ transitions ] --> batches() --> the learner
                                      |    ^                                |
                                 insert    sample                     priorities, where
                                      v    |                           they are used
                                      replay <------------------------------+

Once the replay holds `learn_start` steps, every new step allows `updates_per_step` more updates. At
any time the number of updates is

    floor((collected - learn_start) * updates_per_step)

The source takes the next rollout only when batches for all of these updates have been sampled, so
collection waits for the learner. Two batches are prepared ahead. Uniform sampling does not depend
on thread timing.

`SynchronousTransitions` starts no thread and prepares nothing ahead. With `FreeTransitions` neither
side waits for the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbeast.collect.contract import Source
from torchbeast.collect.replay import Priorities, Replay, ReplayClosed, ReplayStats
from torchbeast.core.base.computing import own_settings
from torchbeast.core.base.nest import Nest, flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.envs.contract import joined_info
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.transition_replay import (
    Sample,
    TransitionReplay,
    importance_weights,
)
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted

_log = logging.getLogger("torchbeast.replay")

_AHEAD = 2  # batches that are prepared
_NO_STATE = (
    "`losses` did not return final_state for a batch with replayed columns, but the next replayed "
    "rollouts begin with it: an algorithm that uses replay with a recurrent network must return "
    "the state after rows 0..T-1 as feedback, as core/algos/impala.py does"
)
_NO_PRIORITIES = (
    "`losses` did not return priorities for a batch with importance weights: an algorithm that "
    "supports prioritised replay must return them as feedback, as core/algos/dqn.py does"
)


class WithReplay(ABC):
    """The base class of sources that put a replay behind another source.

    num_bytes: of the online source, without the replay. seconds, hanging, lost_streams,
    set_env_options: the online source's. _changed: notified when something changes
    for which a thread may wait. _closed: protected by it.
    """

    def __init__(self, online: Source, stats: Callable[[], ReplayStats]) -> None:
        """stats: returns metrics of the replay."""
        self._online = online
        self.num_bytes, self.seconds = online.num_bytes, online.seconds
        self.hanging, self.lost_streams = online.hanging, online.lost_streams
        self.set_env_options = online.set_env_options
        self._stats = stats
        self._changed = threading.Condition()
        self._closed = False

    def start(self, supervisor: Supervisor) -> None:
        """Starts collecting."""
        supervisor.on_close(self.close)
        self._online.start(supervisor)
        supervisor.start_thread("replay", self._run)

    def close(self) -> None:
        """Wakes all threads that wait here or in the online source; may be called again."""
        self._online.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @abstractmethod
    def _run(self) -> None:
        """Fills the replay and makes batches, in a thread."""

    def status(self) -> Mapping[str, float]:
        """Returns the metrics of the online source and of the replay."""
        stats = self._stats()
        return {
            **self._online.status(),
            "replay_fill": round(stats.fill, 4),
            "samples_per_insert": round(stats.samples_per_insert, 4),
        }


class MixedSource(WithReplay):
    """Yields batches of online and replayed columns.

    Threads: `start` adds the threads of the online source and the replay thread to the supervisor.
    When the supervisor ends, it closes both sources, which wakes all waiting threads. Several
    threads may iterate `batches`, each with its own iterator. A batch shares memory with the online
    source and is valid until its iterator advances or ends.
    """

    def __init__(
        self,
        online: Source,
        replay: Replay,
        *,
        batch_size: int,
        spare_columns: int,
        learn_start: int,
        in_flight: int,
        initial_state: Nest[Tensor],
        beta: float | None = None,
    ) -> None:
        """Makes a source; nothing is collected before `start`.

        online: its batches have batch_size columns and spare_columns after them.
        learn_start: number of transitions that the replay must hold before it is sampled.
        in_flight: number of batches in flight, one more than the number of learner threads; 1:
            the online source is not asked for a batch before the learner asks for it.
        initial_state: of the actor, for one column; () without memory, or if states are extras.
        beta: exponent of importance weights, if the replay draws by priority.
        """
        super().__init__(online, replay.stats)
        self._replay = replay
        self._batch_size = batch_size
        self._spare_columns = spare_columns
        self._learn_start = learn_start
        self._initial_state = initial_state
        self._beta = beta
        self._lanes = [_Lane(number, online.batches()) for number in range(in_flight)]
        self._ready: queue.Queue[_Lane | None] = queue.Queue()  # as in Collector
        self._is_asked = False  # for a first batch; protected by _changed
        self._is_too_small = False
        # learn_start; stays True, though later trajectories reduce the size
        self._is_reached = False

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts [T+1, B + spare_columns, ...] on the CPU until the source is closed;
        [T+1, B, ...] while the replay holds too little.
        """
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()
        while (lane := self._ready.get()) is not None:
            assert lane.rollout is not None
            is_learnt = False
            try:
                yield lane.rollout
                is_learnt = True
            finally:  # also if the iterator is abandoned
                with self._changed:
                    lane.is_learnt = is_learnt
                    self._changed.notify_all()
        self._ready.put(None)  # for the next thread

    def close(self) -> None:
        """Wakes all threads that wait here, in the online source or in the replay."""
        super().close()  # the replay thread ends, and tells the learner threads
        self._replay.close()

    def status(self) -> Mapping[str, float]:
        """Returns the metrics of the online source and of the replay. learner_queue_size includes
        the batches that are ready here.
        """
        status = super().status()
        ready = self._ready.qsize() * self._batch_size
        return {**status, "learner_queue_size": status["learner_queue_size"] + ready}

    # --- the replay thread

    def _run(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asked or self._closed)
            with contextlib.suppress(ReplayClosed):
                for lane in itertools.cycle(self._lanes):
                    if not self._is_free(lane):
                        return
                    if (rollout := next(lane.batches, None)) is None:
                        return
                    lane.rollout, lane.is_learnt = self._joined(rollout, lane), None
                    self._ready.put(lane)
        finally:
            self._ready.put(None)

    def _is_free(self, lane: _Lane) -> bool:
        """Waits until the lane's batch is returned, and inserts it; False if closed meanwhile."""
        if lane.rollout is None:
            return True
        with self._changed:
            self._changed.wait_for(lambda: lane.is_learnt is not None or self._closed)
            if self._closed:
                return False
        if lane.is_learnt:
            if lane.rollout.feeds_back and lane.state is None:
                raise RunError(_NO_STATE)
            if self._beta is not None and lane.priorities is None:
                raise RunError(_NO_PRIORITIES)
            arrays = _arrays_of(lane.rollout.columns(0, self._batch_size))
            self._replay.insert(arrays, priorities=lane.priorities)
        lane.rollout = lane.priorities = None
        return True

    def _joined(self, rollout: Rollout, lane: _Lane) -> Rollout:
        """Returns the batch with replayed columns, or without its spare columns."""
        self._is_reached = self._is_reached or self._replay.stats().size >= self._learn_start
        spare = slice(self._batch_size, self._batch_size + self._spare_columns)
        is_walking = bool(flatten(self._initial_state))
        walk = lane.number * self._spare_columns if is_walking else None
        filled = self._replay.fill(_arrays_of(rollout), spare, walk) if self._is_reached else None
        self._check_room(is_empty=self._is_reached and filled is None)
        if filled is None:
            online, lane.windows = rollout.columns(0, self._batch_size), _NO_WINDOWS
            weights, receive = self._weights(online, ()), lane.receive
            online = replace(online, weights=weights, give_feedback=receive)
            return online.without_resets()
        lane.windows = filled.windows
        if is_walking:
            self._write_states(rollout, lane, filled.begins)
        replayed = torch.zeros_like(rollout.done, memory_format=torch.contiguous_format)
        replayed[:, self._batch_size :] = True
        return replace(
            rollout,
            final_observation=_with_finals(rollout, filled.finals),
            replayed=replayed,
            weights=self._weights(rollout, filled.ratios),
            collected=rollout.unroll_length * self._batch_size,
            feeds_back=is_walking,
            give_feedback=lane.receive,
        ).without_resets()

    def _check_room(self, is_empty: bool) -> None:
        """Warns once the replay is full, but nothing can be sampled from it."""
        is_too_small = is_empty and self._replay.stats().fill == 1.0
        if is_too_small and not self._is_too_small:
            unit = "episode" if self._beta is None else "window"
            _log.warning(
                f"the replay is full but does not hold a complete {unit}, so nothing can be "
                "sampled from it: increase replay_size"
            )
        self._is_too_small = is_too_small

    def _weights(self, rollout: Rollout, ratios: Iterable[float]) -> Tensor | None:
        """Returns Rollout.weights; ratios: of the replayed columns. New ones are as likely as in
        uniform sampling.
        """
        if self._beta is None:
            return None
        weights = importance_weights(np.array([*[1.0] * self._batch_size, *ratios]), self._beta)
        return torch.from_numpy(weights).repeat(len(rollout.reward), 1)

    def _write_states(self, rollout: Rollout, lane: _Lane, begins: list[bool]) -> None:
        """Writes the recurrent state before every window: the initial state at the start of an
        episode, otherwise the state after the previous window of the walk.
        """
        written = rollout.initial_agent_state
        initial = map_leaves2(Tensor.expand_as, self._initial_state, written)
        states = written, initial, initial if lane.state is None else lane.state
        for to, first, after in zip(*map(flatten, states), strict=True):
            for column, is_first in enumerate(begins, start=self._batch_size):
                to[:, column] = (first if is_first else after)[:, column]
        lane.state = None


_NO_WINDOWS = np.empty(0, np.int64)


@dataclass(eq=False)
class _Lane:
    """The state shared by every in_flight-th batch."""

    number: int
    batches: Iterator[Rollout]  # of the online source; closing it would free a batch in use
    rollout: Rollout | None = None  # the batch that has not been inserted yet
    is_learnt: bool | None = None  # False: its iterator was abandoned; None: not returned yet
    # Recurrent state before row T of that batch, from its update; leaves [layers, columns, hidden]
    state: Nest[Tensor] | None = None
    windows: np.ndarray = field(default_factory=lambda: _NO_WINDOWS)  # in it
    priorities: Priorities | None = None  # from its update

    def receive(self, feedback: Feedback) -> None:
        """Keeps the recurrent state from which the next windows start, and the priorities."""
        if feedback.final_state is not None:
            self.state = map_leaves(Tensor.cpu, feedback.final_state)
        if feedback.priorities is not None:
            sizes = feedback.priorities.cpu().numpy()
            new = len(sizes) - len(self.windows)
            self.priorities = Priorities(sizes[:new], self.windows, sizes[new:])


def _arrays_of(rollout: Rollout) -> dict[str, Any]:
    """Returns views of all tensors of a batch, by field."""
    return map_leaves(Tensor.numpy, rollout.tensors())


def _with_finals(rollout: Rollout, finals: list[np.ndarray]) -> Nest[Tensor]:
    """Returns the batch's final observations followed by these, leaves [K, *shape]."""
    if not finals:
        return rollout.final_observation
    own = rollout.final_observation
    more = pack_as(own, [torch.from_numpy(leaf) for leaf in finals])
    return map_leaves2(lambda *pair: torch.cat(pair), own, more)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Pace of the updates from a replay of transitions, and how it is sampled."""

    batch_size: int  # transitions
    updates_per_step: float  # after learn_start
    learn_start: int  # steps that the replay must hold before the first update
    total_steps: int  # env steps at which beta is 1
    first_step: int = 0  # env steps of earlier parts of the run
    beta: float | None = None  # initial beta of importance weights; None: uniform sampling

    def beta_at(self, collected: int) -> float:
        """Returns the importance-sampling exponent beta after `collected` steps of this part of the
        run. It grows linearly to 1 (Schaul et al. 2016, section 3.4).
        """
        assert self.beta is not None
        share = min(1.0, (self.first_step + collected) / self.total_steps)
        return self.beta + (1.0 - self.beta) * share


class TransitionSource(WithReplay):
    """Yields samples of a replay that it fills with the rollouts of another source.

    Threads: `start` adds the threads of the online source and the replay thread to the supervisor.
    When the supervisor ends, it closes both sources, which wakes all waiting threads. Several
    threads may iterate `batches`, each with its own iterator. A batch does not share memory.
    """

    def __init__(self, online: Source, replay: TransitionReplay, schedule: Schedule) -> None:
        """Makes a source; nothing is collected before `start`."""
        super().__init__(online, replay.stats)
        self._replay = replay
        self._schedule = schedule
        self._ready: deque[Transitions] = deque()
        self._ended = False  # nothing more is prepared
        # Used by the thread that takes rollouts only:
        self._waits = max(0, schedule.learn_start - replay.size)  # steps
        self._total = 0  # steps collected
        self._prepared = 0  # batches
        self._collected = _Collected()

    def batches(self) -> Iterator[Transitions]:
        """Yields transitions [B, ...] on the CPU until the source is closed."""
        while (batch := self._next()) is not None:
            yield batch

    # --- the learner threads

    def _next(self) -> Transitions | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed or not self._ready:
                return None
            prepared = self._ready.popleft()
            self._changed.notify_all()  # there is room for another
            return prepared

    def _note_priorities(self, names: np.ndarray, feedback: Feedback) -> None:
        """Gives the replay the new priorities of the transitions with these names."""
        if feedback.priorities is None:
            raise RunError(_NO_PRIORITIES)
        with uninterrupted(), self._replay.lock:  # half of it would be wrong
            self._replay.set_priorities(names, feedback.priorities.cpu().numpy())

    # --- the replay thread

    def _run(self) -> None:
        try:
            for rollout in self._online.batches():
                self._insert(rollout)
                self._offer_due()
                if self._closed:
                    return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _insert(self, rollout: Rollout) -> None:
        """Stores a rollout. Afterwards its memory belongs to the online source again."""
        with uninterrupted(), self._replay.lock:
            self._replay.insert(_arrays_of(rollout))
            self._collected.add(rollout)
            self._total += rollout.env_steps

    def _offer_due(self) -> None:
        """Lets the learners take the batches that are due, `_AHEAD` at a time."""
        for batch in self._due():
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < _AHEAD or self._closed)
                self._ready.append(batch)
                self._changed.notify_all()

    def _due(self) -> Iterator[Transitions]:
        """Samples the batches that are due, until the source is closed."""
        learnt_from = max(0, self._total - self._waits)  # steps after learn_start
        due = math.floor(learnt_from * self._schedule.updates_per_step + 1e-9)
        while self._prepared < due and not self._closed:
            batch = self._prepare()
            self._prepared += 1
            yield batch

    def _prepare(self) -> Transitions:
        """Samples a batch, and attributes to it the steps collected since the batch before."""
        schedule = self._schedule
        with own_settings():
            with self._replay.lock:
                sample = self._replay.sample(schedule.batch_size)
                total, collected, self._collected = self._total, self._collected, _Collected()
            batch = collected.counted_in(transitions_of(sample))
            if schedule.beta is None:
                return batch
            weights = importance_weights(sample.probabilities, schedule.beta_at(total))
            give_feedback = functools.partial(self._note_priorities, sample.names)
            return replace(batch, weights=torch.from_numpy(weights), give_feedback=give_feedback)


class FreeTransitions(TransitionSource):
    """Yields samples as fast as the learner asks for them, once there are learn_start steps.

    Learner and environments never wait for each other, as in Ape-X (Horgan et al. 2018, arXiv
    1803.00933). How often a step is sampled therefore depends on the speed of both sides.
    """

    def _next(self) -> Transitions | None:
        with self._changed:
            self._changed.wait_for(
                lambda: 0 < self._total >= self._waits or self._ended or self._closed
            )
            if self._ended or self._closed:
                return None
        return self._prepare()

    def _offer_due(self) -> None:
        """Wakes the learners that waited for the first steps."""
        with self._changed:
            self._changed.notify_all()


class SynchronousTransitions(TransitionSource):
    """Yields samples of a replay, and collects in the same thread, in turns: when the learner asks
    for a batch and no update is due, it collects the next rollouts.

    Every rollout uses the weights of the update before it, and every sample uses the priorities of
    the update before it, so a run does not depend on thread timing. The online source must not
    collect anything before it is asked. If an exception from outside ends an iterator, another
    iterator can continue.
    """

    def start(self, supervisor: Supervisor) -> None:
        """Lets `batches` collect."""
        supervisor.on_close(self.close)
        self._online.start(supervisor)

    def batches(self) -> Iterator[Transitions]:
        """Yields transitions [B, ...] on the CPU until the source is closed."""
        yield from self._due()
        for rollouts in self._online.batches():
            self._insert(rollouts)
            yield from self._due()


@dataclass
class _Collected:
    """Counts what was collected since the last batch."""

    steps: int = 0
    episodes: list[tuple[float, int]] = field(default_factory=list)
    info: dict[str, list[float]] = field(default_factory=dict)  # of the episodes, by keyword
    versions: int = 0  # sum over steps of the policy version that acted
    oldest: int | None = None

    def add(self, rollout: Rollout) -> None:
        """Counts a rollout and its finished episodes."""
        versions, mask = rollout.policy_version[1:], rollout.online_mask
        if mask is not None:
            versions = versions[mask]
        self.steps += rollout.env_steps
        self.episodes += zip(*rollout.finished_episodes(), strict=True)
        self.info = joined_info([self.info, rollout.finished_info()])
        self.versions += int(versions.sum())
        if len(versions):
            oldest = int(versions.min())
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def counted_in(self, batch: Transitions) -> Transitions:
        """Returns the batch with these counts, so that each step is counted in one batch."""
        by = None if self.oldest is None else (self.versions / self.steps, self.oldest)
        return replace(
            batch,
            env_steps=self.steps,
            episodes=tuple(self.episodes),
            info=self.info,
            collected_by=by,
        )


def transitions_of(sample: Sample) -> Transitions:
    """Returns a sample as tensors that share its memory."""
    arrays = sample._asdict()
    del arrays["names"], arrays["probabilities"]
    fields: dict[str, Any] = map_leaves(torch.from_numpy, arrays)
    if not sample.later_rewards.shape[1]:
        fields.update(later_rewards=None, num_joined=None)
    return Transitions(**fields, env_steps=0)
