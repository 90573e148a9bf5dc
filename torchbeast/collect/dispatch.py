# SPDX-License-Identifier: Apache-2.0
"""Dispatch: which worker of a fleet plays when, and with which version of the weights.

The Dispatcher runs all events of a source, one at a time. The pacing decides whether a worker may
play its next rollout:

    Free        as soon as it has a free slot; every action with the newest weights
    FixedLag    as soon as the weights exist that will be K updates old when the learner uses the
                rollout; the learner takes the rollouts of the workers in turn
    OnDemand    when the learner asks for the next batch, with the weights of that moment

Rollouts are numbered in turn over the workers. With a fixed lag, update i * E // B uses rollout i,
for E environments of a worker and batches of B. Only events ask for grants.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torchbeast.collect.rollout_buffers import Written
from torchbeast.collect.weights import SharedWeights
from torchbeast.core.storages.rollout import Rollout
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted

Event = Callable[[], None]

_POLL_S = 1.0  # between two calls of `poll`


class Dispatcher:
    """Runs events in the order in which they come. Any thread may call any method.

    If an event raises an exception, the run fails.
    """

    def __init__(self, runs_in_place: bool, poll: Event) -> None:
        """runs_in_place: run an event in the thread that calls `do`, or in one that is running
        events, because every switch to another thread would delay a rollout; False: only in the
        dispatcher's own thread. poll: an event to run every _POLL_S.
        """
        self._runs_in_place, self._poll = runs_in_place, poll
        self._events: collections.deque[Event] = collections.deque()
        self._wake = threading.Semaphore(0)
        self._running = threading.Lock()  # held by the thread that runs events
        self._closed = threading.Event()

    def start(self, supervisor: Supervisor) -> None:
        """Starts the thread that polls, and may run events."""
        self._supervisor = supervisor
        supervisor.start_thread("dispatcher", self._dispatch)

    def close(self) -> None:
        """Ends the thread. May be called again."""
        self._closed.set()
        self._wake.release()

    def do(self, event: Event) -> None:
        """Runs an event, now or soon."""
        self._events.append(event)
        if self._runs_in_place:
            self.run_events()
        else:
            self._wake.release()

    def run_events(self) -> None:
        """Runs all events, unless another thread does."""
        with uninterrupted():
            while self._events and self._running.acquire(blocking=False):
                try:
                    while self._events:
                        self._events.popleft()()
                except Exception as error:
                    self._supervisor.fail("dispatcher", error)
                finally:
                    self._running.release()

    def _dispatch(self) -> None:
        polled = time.monotonic()
        while not self._closed.is_set():
            left = polled + _POLL_S - time.monotonic()
            if left <= 0:
                self.do(self._poll)
                polled, left = time.monotonic(), _POLL_S
            self._wake.acquire(timeout=left)
            self.run_events()


class Grant(NamedTuple):
    """The permission to play one rollout.

    version: of the weights for all of its steps; None: the newest version at every step.
    """

    version: int | None


class Free:
    """Nobody waits: the learner takes rollouts as they are completed.

    takes_turns: whether workers wait for each other, and get the weights of a rollout with its
    grant.
    """

    takes_turns = False

    def grant(self, rollout: int, num_envs: int) -> Grant | None:
        """Returns the permission to play a rollout, or None: not yet.

        rollout: its number. num_envs: number of its environments.
        """
        return Grant(None)

    def in_order(self, played: Iterable[tuple[int, Written]]) -> Iterator[Written]:
        """Yields rollouts in the order in which the learner trains on them.

        played: each with the index of its worker, in the order in which they were completed.
        """
        return (written for _, written in played)

    def batches(self, batches: Iterator[Rollout]) -> Iterator[Rollout]:
        """Yields the collector's batches to a learner thread."""
        return batches


class FixedLag(Free):
    """Rollouts are a fixed number of updates old when the learner trains on them, so a run is
    reproducible, regardless of the speed of its workers.
    """

    takes_turns = True

    def __init__(self, weights: SharedWeights, batch_size: int, num_workers: int, lag: int) -> None:
        """weights: their present version is the one before the first update."""
        self._weights, self._batch_size = weights, batch_size
        self._num_workers, self._lag = num_workers, lag
        self._first_version = weights.version

    def grant(self, rollout: int, num_envs: int) -> Grant | None:
        update = self._update_with(rollout, num_envs)
        version = self._first_version + max(0, update - self._lag)
        return Grant(version) if version <= self._weights.version else None

    def _update_with(self, rollout: int, num_envs: int) -> int:
        """Returns the number of the update that uses the rollout."""
        return rollout * num_envs // self._batch_size

    def in_order(self, played: Iterable[tuple[int, Written]]) -> Iterator[Written]:
        waiting = [collections.deque[Written]() for _ in range(self._num_workers)]
        turn = 0
        for worker, written in played:
            waiting[worker].append(written)
            while waiting[turn]:
                yield waiting[turn].popleft()
                turn = (turn + 1) % self._num_workers


class OnDemand(FixedLag):
    """Collects a batch only when the learner asks for it, in one thread, whatever the version of
    the weights is.
    """

    def __init__(
        self,
        weights: SharedWeights,
        batch_size: int,
        num_workers: int,
        grant_after: Callable[[Event], None],
    ) -> None:
        """grant_after: runs an event, and then grants slots."""
        super().__init__(weights, batch_size, num_workers, lag=0)
        self._grant_after = grant_after
        self._requests = 0  # requested batches so far
        self._version = weights.version  # of the weights for the last one
        self._is_pending = False  # whether a requested batch has not been taken yet

    def grant(self, rollout: int, num_envs: int) -> Grant | None:
        is_requested = self._update_with(rollout, num_envs) < self._requests
        return Grant(self._version) if is_requested else None

    def batches(self, batches: Iterator[Rollout]) -> Iterator[Rollout]:
        with contextlib.closing(batches):  # type: ignore[type-var]
            while True:
                self.request()
                batch = next(batches, None)
                if batch is None:
                    return
                self._is_pending = False
                yield batch

    def request(self) -> None:
        """Lets every worker play for a batch, unless an earlier request has not been used."""
        if not self._is_pending:
            self._is_pending = True
            self._grant_after(functools.partial(self._begin_batch, self._weights.version))

    def _begin_batch(self, version: int) -> None:
        self._requests += 1
        self._version = version
