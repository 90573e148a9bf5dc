# SPDX-License-Identifier: Apache-2.0
"""What a worker reports: its stage, the seconds it has spent in each stage, and its rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

STAGES = ("environment", "inference", "queueing", "starting")


class ActivityReport(NamedTuple):
    """A worker's current stage, and the time it has spent in each since its start."""

    stage: str
    seconds_in_stage: float
    seconds: dict[str, float]  # by stage
    steps: int  # of all its environments


class Started(NamedTuple):
    """A worker's environments and network are made."""

    activity: ActivityReport
    reads_weights: bool  # from the learner's memory, so that none need be sent


class PlayedRollout(NamedTuple):
    """One rollout."""

    arrays: Any  # None: they are in a slot that the worker shares with the source
    activity: ActivityReport


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
