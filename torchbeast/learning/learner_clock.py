# SPDX-License-Identifier: Apache-2.0
"""Measures how long the learner has learnt and how long it has waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LearnerClock:
    """Splits wall-clock time into "learning" (during an update) and "waiting" (between updates).

    The two add up to the time since the clock was made for any number of learner threads, because
    updates run one at a time. A running update counts up to now. May be read by any thread.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._began = now()
        self._learnt = 0.0
        self._since: float | None = None  # start of the running update

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Measures an update; used by one thread at a time."""
        with self._lock:
            self._since = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._learnt, self._since = self._learning(self._now()), None

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent until now, by stage."""
        with self._lock:
            now = self._now()
            learning = self._learning(now)
        return {"learning": learning, "waiting": now - self._began - learning}

    def _learning(self, now: float) -> float:
        return self._learnt + (0.0 if self._since is None else now - self._since)
