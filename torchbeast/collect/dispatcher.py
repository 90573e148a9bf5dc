# SPDX-License-Identifier: Apache-2.0
"""Runs the events of a source one at a time, so that they need no other lock."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

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
