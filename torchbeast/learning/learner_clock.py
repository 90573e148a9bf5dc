# SPDX-License-Identifier: Apache-2.0
"""How long the learner has learnt and how long it has waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LearnerClock:
    """Seconds since it was made: "learning" (an update is under way) and "waiting" (none is).

    The two add up to the time on the wall, however many learner threads there are: updates are
    done one at a time. An update that is still under way counts as far as it is. Read by any
    thread.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._began = now()
        self._learnt = 0.0
        self._since: float | None = None  # of the update that is under way

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around one update; one thread at a time."""
        with self._lock:
            self._since = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._learnt, self._since = self._learning(self._now()), None

    def seconds(self) -> dict[str, float]:
        """What was spent until now."""
        with self._lock:
            now = self._now()
            learning = self._learning(now)
        return {"learning": learning, "waiting": now - self._began - learning}

    def _learning(self, now: float) -> float:
        return self._learnt + (0.0 if self._since is None else now - self._since)
