# SPDX-License-Identifier: Apache-2.0
"""Ends a run: the first failure or stop closes everything once, and is reported. Until then it
replaces workers that die: worker processes, environment servers and Ray actors alike.

    start_thread() ... a thread raises -> fail() -+
    Ctrl-C, SIGTERM,
    SIGHUP          -> wait() sees it  -> stop() -+-> every on_close function, in reverse order
    all steps are learnt               -> stop() -+

    start --> works --> dies --> pause --> a replacement starts in its place
                         |
                         +--> the run fails if no worker has worked yet, or too many died here

Thread safety: any thread may call any method, except that only the main thread calls `wait` and
`signals`. Every wait has a time limit.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from torchbeast.errors import EXIT_INTERRUPTED, RunError, UsageError, exit_now, started
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.system import leave_lost_terminal, show_cursor
from torchbeast.fleets.waiting import running_time, wait_until

_log = logging.getLogger("torchbeast.supervisor")

_SIGNAL_POLL_S = 0.1
# Programs such as `timeout` signal a process and its group, so that a signal arrives twice.
SECOND_SIGNAL_S = 1.0
_MOST_DEATHS = 5  # of a worker and its replacements ...
_DEATHS_S = 600.0  # ... within this time; further replacements would probably die too
_LONGEST_PAUSE_S = 90.0
_PAUSE_S = 10.0  # if a replacement could not start; tripled each time after that


@dataclass(frozen=True)
class Failure:
    """The first failure of a run."""

    origin: str  # the thread or process that failed; "" for the program itself
    error: BaseException

    def __str__(self) -> str:
        what = str(self.error).strip() or type(self.error).__name__
        return f"{self.origin}: {what}" if self.origin else what


class RunEnded(RunError):
    """The run has ended, or a signal has asked for its end, so nobody waits any longer."""


class _RunThread(threading.Thread):
    """A thread of a run, started by its supervisor."""


def end_program(code: int) -> NoReturn:
    """Ends a program whose run has ended, even if some threads of the run have not.

    Such a thread may be inside torch's C++ code. If it returned while Python is being finalised, it
    would abort the process: "terminate called without an active exception".
    """
    if any(isinstance(thread, _RunThread) for thread in threading.enumerate()):
        exit_now(code)
    sys.exit(code)


class Supervisor:
    """Starts the threads of a run, ends them together, and keeps the reason.

    ended: whether the run has been stopped or has failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ended = False
        self._wake = threading.Event()  # set when the run has ended
        self._closers: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        self._signal: str | None = None
        self._asked_time: float | None = None  # of the first SIGINT or SIGTERM
        self.reason: str | None = None
        self.failure: Failure | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run."""
        return self._signal is not None and self.reason == self._signal

    @property
    def has_signal(self) -> bool:
        """Whether a signal has asked for the end of the run, which may have ended before."""
        return self._signal is not None

    def start_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Runs `body` in a thread. If it raises, the run fails, unless it has already ended.

        Raises RunError if there may be no more threads.
        """
        thread = _RunThread(target=self._run, args=(name, body), name=name, daemon=True)
        with self._lock:  # `join` needs threads that have started
            started(thread)
            self._threads.append(thread)
        return thread

    def on_close(self, close: Callable[[], None]) -> None:
        """Calls `close` once when the run ends, or now if the run has already ended."""
        with self._lock:
            if not self.ended:
                self._closers.append(close)
                return
        self._call(close)

    def fail(self, origin: str, error: BaseException) -> None:
        """Ends the run with this failure. If the run has already ended, only logs it.

        The run also counts as ended if a signal came first, because the signal may have caused the
        failure, for example in a child process that received it too.
        """
        if self._signal is not None:
            self._stop_by(self._signal)
        if not self._end(None, Failure(origin, error)):
            _log.info("after the end, %s: %r", origin, error)

    def fail_at_end(self, origin: str, error: BaseException) -> None:
        """Records the first failure of the run, even if the run has already ended normally."""
        with self._lock:
            if self.ended and self.failure is None:
                self.failure = Failure(origin, error)
        self.fail(origin, error)

    def stop(self, reason: str) -> None:
        """Ends the run normally; does nothing if it has already ended."""
        self._end(reason, None)

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the end of the run; returns whether it has ended.

        If signals are handled, only the main thread may call it.
        """
        leave_lost_terminal()  # if the program outlives it
        deadline = time.monotonic() + timeout
        while not self.ended:
            if self._signal is not None:
                self._stop_by(self._signal)
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._wake.wait(min(left, _SIGNAL_POLL_S))
        return self.ended

    def join(self, timeout: float) -> list[str]:
        """Waits up to `timeout` seconds in total for the threads; returns the names of the threads
        that are still running.
        """
        deadline = running_time() + timeout
        for thread in list(self._threads):
            wait_until(deadline, functools.partial(_joined, thread))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def check_goes_on(self) -> None:
        """Raises RunError if the run has ended, or if a signal has asked for its end."""
        if self.ended or self.has_signal:
            raise RunEnded("the run has ended")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Handles SIGINT, SIGTERM and SIGHUP: the first one stops the run normally.

        A second one, at least SECOND_SIGNAL_S later, ends the process immediately. SIGHUP never
        counts as one of the two, because it comes from a lost terminal, and programs that end a
        session send SIGTERM after it. If SIGHUP is ignored, as under nohup, it stays ignored.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _handled()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        # Runs between two instructions of the main thread, which may hold any lock. So only record
        # it.
        self._signal = self._signal or signal.Signals(number).name
        leave_lost_terminal()
        if number == signal.SIGHUP:
            return
        now = time.monotonic()
        if self._asked_time is None:
            self._asked_time = now
        elif now - self._asked_time >= SECOND_SIGNAL_S:
            show_cursor()
            os._exit(EXIT_INTERRUPTED)

    def _stop_by(self, name: str) -> None:
        leave_lost_terminal(pipes=True)  # a pipe to `tee`, which the same signal has ended
        self.stop(name)

    def _run(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self.fail(name, error)
            # Release the objects that the thread held, because others may be waiting for them, for
            # example callers of an inference batch that was dropped.
            traceback.clear_frames(error.__traceback__)

    def _end(self, reason: str | None, failure: Failure | None) -> bool:
        with self._lock:
            if self.ended:
                return False
            self.reason, self.failure = reason, failure
            closers, self._closers = self._closers[::-1], []
            self.ended = True
            self._wake.set()
        if failure is not None:
            is_refused = isinstance(failure.error, UsageError)  # its message says everything
            trace = None if is_refused else failure.error
            _log.error("the run failed: %s", failure, exc_info=trace)
        for close in closers:
            self._call(close)
        return True

    def _call(self, close: Callable[[], None]) -> None:
        try:
            close()
        except Exception:
            _log.exception("while closing")


def _joined(thread: threading.Thread, timeout: float) -> bool:
    thread.join(timeout)
    return not thread.is_alive()


def _handled() -> list[signal.Signals]:
    """Returns the signals that end a run; without SIGHUP under nohup."""
    is_kept = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if is_kept else [])]


class RestartPolicy:
    """Decides from the deaths of a worker and its replacements whether and when another one starts.
    Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=_MOST_DEATHS)
        self._any_worked = self._works = False
        self._failed_starts = 0

    def works(self) -> None:
        """Records that the current process works."""
        self._any_worked = self._works = True
        self._failed_starts = 0

    def is_replaced(self) -> None:
        """Records that another process takes the place of the current one, and has yet to work."""
        self._works = False

    def may_pass(self, error: Exception) -> bool:
        """Returns whether a replacement may survive: if this process was killed or crashed, or if
        it could not start although an earlier one could (a file or port may be back soon).
        """
        return isinstance(error, ProcessDied) or (self._any_worked and not self._works)

    def pause(self) -> float:
        """Returns the seconds to wait before the next start: 0 unless the last start failed."""
        if not self._failed_starts:
            return 0.0
        return min(_LONGEST_PAUSE_S, _PAUSE_S * 3.0 ** (self._failed_starts - 1))

    def too_many(self, error: Exception) -> ProcessDied | None:
        """Counts a death; returns the final error if there were too many, else None."""
        self._works = False
        self._failed_starts += not isinstance(error, ProcessDied)
        self._times.append(time.monotonic())
        seconds = self._times[-1] - self._times[0]
        if len(self._times) < _MOST_DEATHS or seconds >= _DEATHS_S:
            return None
        many = f"{_MOST_DEATHS} processes died in its place within {seconds:.0f} s"
        return ProcessDied(f"{many}. The last one: {error}")


class Restartable(Protocol):
    """A worker that can be replaced by another, which then does the same work."""

    name: str
    restart_policy: RestartPolicy

    def start(self) -> None:
        """Starts a worker: the first one, or a replacement.

        Raises OSError or RunError if the system cannot start it.
        """


class Restarts:
    """Starts and replaces a group of workers. Any thread may call any method.

    Attributes:
        closed: set by `close`.
        replaced: number of workers that were replaced.
        supervisor: of the run; set it before the first worker starts.
    """

    supervisor: Supervisor

    def __init__(self, log: logging.Logger) -> None:
        """log: receives a warning for every replaced worker."""
        self.closed = threading.Event()
        self.replaced = 0
        self._log = log
        self._any_works = False
        self._lock = threading.RLock()  # a failure of `worker.start` may close, in the same thread

    def start(self, worker: Restartable) -> None:
        """Starts a worker for the first time."""
        with self._lock:  # so that `ended` waits until the worker has started
            worker.start()

    def works(self, worker: Restartable) -> None:
        """Records that a worker works."""
        self._any_works = True
        worker.restart_policy.works()

    def ended(self, worker: Restartable, error: Exception) -> None:
        """Replaces a worker that died, or a replacement that could not start.

        If it ended in another way, the run fails. It also fails if a worker dies before any worker
        has worked, or if too many die, because replacements would probably die of the same cause.
        """
        with self._lock:
            if self.closed.is_set():
                return
        may_pass = worker.restart_policy.may_pass(error) and self._any_works
        failure = worker.restart_policy.too_many(error) if may_pass else error
        if failure is None:
            self.replace(worker, error)
        else:
            self.supervisor.fail(worker.name, failure)

    def replace(self, worker: Restartable, error: Exception) -> None:
        """Replaces a worker, unless closed. Waits first if the last one could not start."""
        worker.restart_policy.is_replaced()
        pause = worker.restart_policy.pause()
        when = f" in {pause:g} s" if pause else ""
        self._log.warning("%s: %s. Starting a replacement%s", worker.name, error, when)
        self.closed.wait(pause)
        try:
            with self._lock:
                if self.closed.is_set():
                    return
                self.replaced += 1
                worker.start()
        except (OSError, RunError) as problem:  # the system cannot start a process
            # Without the lock, because the end of the run calls `close`.
            self.ended(worker, problem)

    def close(self) -> None:
        """Stops replacing workers. May be called again."""
        with self._lock:
            self.closed.set()
