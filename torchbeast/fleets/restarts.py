# SPDX-License-Identifier: Apache-2.0
"""Replaces workers that die: worker processes, environment servers and Ray actors alike.

start --> works --> dies --> pause --> a replacement starts in its place
                     |
                     +--> the run fails if no worker has worked yet, or too many died here
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Protocol

from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.supervisor import Supervisor

_MOST_DEATHS = 5  # of a worker and its replacements ...
_DEATHS_S = 600.0  # ... within this time; further replacements would probably die too
_LONGEST_PAUSE_S = 90.0
_PAUSE_S = 10.0  # if a replacement could not start; tripled each time after that


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

        Raises OSError if the system cannot start it.
        """


class Restarts:
    """Starts and replaces a group of workers. Any thread may call any method.

    Attributes:
        closed: set by `close`.
        replaced: number of workers that were replaced.
        supervisor: of the run; set it before the first worker starts.
    """

    def __init__(self, log: logging.Logger, supervisor: Supervisor | None = None) -> None:
        """log: receives a warning for every replaced worker."""
        self.closed = threading.Event()
        self.replaced = 0
        self.supervisor = supervisor
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
        if not (worker.restart_policy.may_pass(error) and self._any_works):
            self._fail(worker, error)
        elif failure := worker.restart_policy.too_many(error):
            self._fail(worker, failure)
        else:
            self.replace(worker, error)

    def replace(self, worker: Restartable, error: Exception) -> None:
        """Replaces a worker, unless closed. Waits first if the last one could not start."""
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
        except OSError as problem:  # the system cannot start a process
            # Without the lock, because the end of the run calls `close`.
            self._fail(worker, problem)

    def close(self) -> None:
        """Stops replacing workers. May be called again."""
        with self._lock:
            self.closed.set()

    def _fail(self, worker: Restartable, error: Exception) -> None:
        assert self.supervisor is not None
        self.supervisor.fail(worker.name, error)
