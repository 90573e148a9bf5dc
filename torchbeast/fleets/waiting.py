# SPDX-License-Identifier: Apache-2.0
"""Tells the user what a program is waiting for, and prints messages that also go to out.log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchbeast.errors import readable

WAIT_S = 10.0
"""Seconds without an update after which the cause is reported. `Source.hanging` describes workers
that have taken that long."""

STALL_S = 60.0
"""Seconds in one stage after which a worker is reported, even if the learner continues with data of
other workers. Also the time between two reports."""

_log = logging.getLogger("torchbeast.waiting")

_LOOK_S = 1.0
_PAUSE_S = 5.0  # between two readings of a RunningClock, after which the process did not run


class RunningClock:
    """A monotonic clock that stands still while this process does not run.

    SIGSTOP, a container's freezer or a batch system may stop the whole run for any time. That time
    must not be charged to a worker, and no process is told how long it was. But somebody who waits
    reads the clock every second or two, so nobody ran during a longer time between two readings.

    Thread safety: any thread and any signal handler may read it. It has no lock, which the reading
    that a signal interrupts would hold, and forks would inherit.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """now: a monotonic clock that runs on."""
        self._now = now
        self._last = now(), 0.0  # a reading, and the seconds of all pauses before it

    def __call__(self) -> float:
        """Returns the time in seconds."""
        before, stopped = self._last
        now = self._now()
        stopped += max(0.0, now - before - _PAUSE_S)
        self._last = now, stopped  # together; an older reading in its place would do as well
        return now - stopped


running_time = RunningClock()
"""The clock of all waits for other processes, and of their deadlines."""


def wait_until(deadline: float, wait: Callable[[float], bool]) -> bool:
    """Waits until `deadline` (of running_time), which may have passed; returns whether `wait` did.

    wait: waits for some seconds and returns whether that was enough, like Event.wait.
    """
    while True:
        left = deadline - running_time()
        if wait(min(max(0.0, left), _LOOK_S)):
            return True
        if left <= 0:
            return False


class Timer(threading.Timer):
    """Calls a function after some seconds of running_time, in a thread; see threading.Timer."""

    def run(self) -> None:
        if not wait_until(running_time() + self.interval, self.finished.wait):
            self.function()


class Reminder:
    """Decides when to report a wait: after some time, then every STALL_S. Used by one thread."""

    def __init__(self, now: float, after: float | None = None) -> None:
        """after: seconds until the first report; None: WAIT_S."""
        self._after = WAIT_S if after is None else after
        self._since = now
        self._next = now

    def restart(self, now: float) -> None:
        """Notes that the program is not waiting now."""
        self._since = now

    def due(self, now: float) -> float | None:
        """Returns the seconds of the wait if it is time to report it, else None."""
        seconds = now - self._since
        if seconds < self._after or now < self._next:
            return None
        self.delay(now)
        return seconds

    def delay(self, now: float) -> None:
        """Notes that another message was reported, which may have the same cause."""
        self._next = now + STALL_S


@contextmanager
def waiting_for(what: str | Callable[[], str], is_logged: bool = True) -> Iterator[None]:
    """Reports what the block waits for, if it takes long. what: a noun phrase. is_logged: see
    `warn`.
    """
    ended = threading.Event()

    def remind() -> None:
        reminder = Reminder(running_time())
        while not ended.wait(_LOOK_S):
            if (seconds := reminder.due(running_time())) is not None:
                named = what if isinstance(what, str) else what()
                warn(f"waiting for {named}, for {seconds:.0f} s so far", is_logged)

    thread = threading.Thread(target=remind, name="waiting", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the limit of threads: a checkpoint is more important than a reminder
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


def say(sentence: str) -> None:
    """Prints a message, and logs it, because tomorrow only out.log will be left."""
    _log.info("%s", sentence)
    print(readable(sentence), flush=True)


def warn(sentence: str, is_logged: bool = True) -> None:
    """Prints a warning on stderr, and logs it, unless out.log itself may be what hangs."""
    print(f"Warning: {readable(sentence)}", file=sys.stderr, flush=True)
    if is_logged:  # as info, because the handler of warnings would draw over a panel
        _log.info("Warning: %s", sentence)
