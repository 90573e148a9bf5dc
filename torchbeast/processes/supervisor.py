# SPDX-License-Identifier: Apache-2.0
"""How a run ends: the first failure or stop closes everything, once, and is what is reported.

    start_thread() ... a thread raises -> fail() -+
    Ctrl-C, SIGTERM -> wait() sees it  -> stop() -+-> every on_close function, in reverse order
    the last step was learnt           -> stop() -+

Thread safety: every method may be called from any thread; `wait` and the signal handlers belong
to the main thread. Nothing here waits without a bound.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("torchbeast.supervisor")

_SIGNAL_POLL_S = 0.1
EXIT_INTERRUPTED_TWICE = 130
# `timeout`, and whatever else signals both a process and its group, sends one signal twice at once.
SECOND_SIGNAL_S = 1.0


@dataclass(frozen=True)
class Failure:
    """What failed first."""

    origin: str  # "" for what the program itself did
    error: BaseException

    def __str__(self) -> str:
        what = str(self.error).strip() or type(self.error).__name__
        return f"{self.origin}: {what}" if self.origin else what


class Supervisor:
    """Threads, their end, and the reason for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closers: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        self._signal: str | None = None
        self._signal_time = 0.0
        self.reason: str | None = None
        self.failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """True from the first stop or failure on."""
        return self._ended.is_set()

    @property
    def interrupted(self) -> bool:
        """True when a signal was the reason for the end."""
        return self._signal is not None and self.reason == self._signal

    def start_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Runs `body` in a thread whose exception is the failure of the run (unless that ended
        before).
        """
        thread = threading.Thread(target=self._run, args=(name, body), name=name, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()
        return thread

    def on_close(self, close: Callable[[], None]) -> None:
        """Calls `close` once when the run ends; at once when it has ended already."""
        with self._lock:
            if not self.ended:
                self._closers.append(close)
                return
        self._call(close)

    def fail(self, origin: str, error: BaseException) -> None:
        """Ends the run with this failure; only logged when the run has ended already."""
        if not self._end(None, Failure(origin, error)):
            _log.info("after the end, %s: %r", origin, error)

    def fail_at_end(self, origin: str, error: BaseException) -> None:
        """Makes this the failure of a run that has none, even if it ended in good order before."""
        with self._lock:
            if self.ended and self.failure is None:
                self.failure = Failure(origin, error)
        self.fail(origin, error)

    def stop(self, reason: str) -> None:
        """Ends the run in good order; nothing when it has ended already."""
        self._end(reason, None)

    def wait(self, timeout: float) -> bool:
        """Waits until the run has ended or `timeout` seconds passed;
        true when it has. Main thread only.
        """
        deadline = time.monotonic() + timeout
        while not self.ended:
            if self._signal is not None:
                self.stop(self._signal)
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._ended.wait(min(left, _SIGNAL_POLL_S))
        return self.ended

    def join(self, timeout: float) -> list[str]:
        """Waits for the threads, `timeout` seconds in all; the names of those that still run."""
        deadline = time.monotonic() + timeout
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the run in good order;
        a later second one ends the process at once.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        # Runs between two instructions of the main thread, which may hold any lock: only note it.
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._signal_time = signal.Signals(number).name, now
        elif now - self._signal_time >= SECOND_SIGNAL_S:
            os._exit(EXIT_INTERRUPTED_TWICE)

    def _run(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self.fail(name, error)
            # What the thread held must go now: others may wait for it, as callers do whose
            # inference batch was dropped.
            traceback.clear_frames(error.__traceback__)

    def _end(self, reason: str | None, failure: Failure | None) -> bool:
        with self._lock:
            if self.ended:
                return False
            self.reason, self.failure = reason, failure
            closers, self._closers = self._closers[::-1], []
            self._ended.set()
        if failure is not None:
            _log.error("the run failed: %s", failure, exc_info=failure.error)
        for close in closers:
            self._call(close)
        return True

    def _call(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:
            _log.exception("while closing")
