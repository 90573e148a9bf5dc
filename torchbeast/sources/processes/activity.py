# SPDX-License-Identifier: Apache-2.0
"""The activity of a worker: its current stage, and the seconds that it has spent in each."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchbeast.sources.processes.fleet import ActivityReport

STAGES = ("environment", "inference", "queueing", "starting")


class Activity:
    """Written by the thread that plays, read by any other."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begins in the stage "starting"."""
        self._now = now
        self._present = "starting", now()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._steps = 0

    def enter(self, stage: str) -> None:
        """Records a change to this stage."""
        (before, since), now = self._present, self._now()
        self._seconds[before] += now - since
        self._present = stage, now

    def count(self, steps: int) -> None:
        """Adds to the number of steps."""
        self._steps += steps

    def report(self) -> ActivityReport:
        """Returns the present stage, and totals: of seconds until the last change."""
        stage, since = self._present
        return ActivityReport(stage, self._now() - since, dict(self._seconds), self._steps)
