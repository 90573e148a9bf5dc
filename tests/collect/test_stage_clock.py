# SPDX-License-Identifier: Apache-2.0
"""A worker's activity is known at any time, however long its rollouts are."""

from __future__ import annotations

import pytest

from torchbeast.collect.worker import StageClock
from torchbeast.reporting.diagnosis import Reading, RecentShares
from torchbeast.run.rows import LearnerClock


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def test_time_after_a_change_belongs_to_the_stage_that_was_entered() -> None:
    clock = Clock()
    stages = StageClock(clock)
    for stage, seconds in (("queueing", 4.0), ("inference", 1.0), ("environment", 2.0)):
        clock.time += seconds
        stages.enter(stage)
    stages.count(3)
    clock.time += 75.0
    stages.count(5)
    expected = {"starting": 4.0, "queueing": 1.0, "inference": 2.0, "environment": 0.0}
    assert stages.report() == ("environment", 75.0, expected, 8)


def test_time_shares_are_known_however_long_a_rollout_takes() -> None:
    """No rollout is complete within these 30 seconds."""
    clock = Clock()
    stages, learner, window = StageClock(clock), LearnerClock(clock), RecentShares()
    for second in range(30):
        stages.enter("environment" if second % 4 else "inference")
        clock.time += 1.0
        found = window.add(Reading(clock.time, stages.report().seconds | learner.seconds()))
    assert found.environment == pytest.approx(0.75, abs=0.06) and found.queueing == 0
