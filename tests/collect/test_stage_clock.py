# SPDX-License-Identifier: Apache-2.0
"""A worker's activity is known at any time, however long its rollouts are, and whether its
environments compute or wait.
"""

from __future__ import annotations

import time

import pytest
from compliance.source import Setup
from fleet_running import running_mono

from torchbeast.collect.contract import CollectionPlan
from torchbeast.collect.worker import StageClock
from torchbeast.fleets.system import core_time
from torchbeast.reporting.diagnosis import Reading, RecentShares, diagnose, shares
from torchbeast.run.training import LearnerClock


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
    stage, seconds, totals, steps = stages.report()
    assert (stage, seconds, steps) == ("environment", 75.0, 8)
    assert expected.items() <= totals.items() and totals["computing"] > 0


def test_time_shares_are_known_however_long_a_rollout_takes() -> None:
    """No rollout is complete within these 30 seconds."""
    clock = Clock()
    stages, learner, window = StageClock(clock), LearnerClock(clock), RecentShares()
    for second in range(30):
        stages.enter("environment" if second % 4 else "inference")
        clock.time += 1.0
        found = window.add(Reading(clock.time, stages.report().seconds | learner.seconds()))
    assert found.environment == pytest.approx(0.75, abs=0.06) and found.queueing == 0


def test_a_user_with_64_sleeping_environments_is_told_to_add_environments() -> None:
    sleeping = Setup(
        env_id="source_envs:Sleeping", model="mlp", num_envs=64, num_groups=2, batch_size=32
    )
    with running_mono(sleeping) as running:
        learner, batches = LearnerClock(), running.source.batches()

        def reading_after(count: int) -> Reading:
            for _ in range(count):
                next(batches)
            stages = running.source.seconds() | learner.seconds()
            return Reading(time.monotonic(), stages, cores=core_time())

        first = reading_after(1)
        found = shares(reading_after(4), first)
    alone = found._replace(wanted=found.own, used=found.own / 2)  # whatever else the machine does
    plan = CollectionPlan(num_envs=64, processes=2, fixed_lag=None, cores=2)
    diagnosis = diagnose(alone, plan)
    assert diagnosis is not None and diagnosis.limit == "environment", found
    assert "environments waiting" in diagnosis.sentence
    assert ": raise num_envs and num_workers; this run uses 0." in diagnosis.sentence
