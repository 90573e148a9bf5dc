# SPDX-License-Identifier: Apache-2.0
"""Reports of workers: the current stage, the seconds spent in each stage, and rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

STAGES = ("environment", "inference", "queueing", "starting")


class ActivityReport(NamedTuple):
    """A worker's current stage, and the time that it has spent in each stage since it started."""

    stage: str
    seconds_in_stage: float
    seconds: dict[str, float]  # by stage
    steps: int  # of all its environments


class Started(NamedTuple):
    """A worker has made its environments and its network."""

    activity: ActivityReport
    reads_weights: bool  # from the learner's memory, so the learner need not send them


class PlayedRollout(NamedTuple):
    """One rollout."""

    arrays: Any  # None: the arrays are in a slot that the worker shares with the source
    activity: ActivityReport


class Activity:
    """Counts the time spent in each stage. The thread that plays writes it, any thread may read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Starts in the stage "starting"."""
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
        """Returns the current stage, its seconds so far, and the totals of the completed stages."""
        stage, since = self._present
        return ActivityReport(stage, self._now() - since, dict(self._seconds), self._steps)
