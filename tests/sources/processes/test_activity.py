# SPDX-License-Identifier: Apache-2.0
"""The activity of actor processes is known without reports; one that hangs is given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mono_running import config_of

from torchbeast.core.actors.registry import make_agent
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.specs import ActorSpec
from torchbeast.envs import EnvSpec
from torchbeast.learning.training import LearnerClock
from torchbeast.reporting.diagnosis import Reading, Window
from torchbeast.sources.processes.activity import Activity, SharedActivities
from torchbeast.sources.processes.shared_weights import SharedWeights
from torchbeast.sources.processes.source import MonoSource


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def activity(clock: Clock, index: int = 1) -> Activity:
    made = SharedActivities(2).of(index)
    made._now = clock
    return made


def test_time_after_a_change_belongs_to_the_stage_that_was_entered(clock: Clock) -> None:
    actor = activity(clock)
    actor.start()
    for stage, seconds in (("queueing", 4.0), ("inference", 1.0), ("environment", 2.0)):
        clock.time += seconds
        actor.enter(stage)
    clock.time += 75.0
    assert actor.present() == ("environment", 75.0)
    expected = {"starting": 4.0, "queueing": 1.0, "inference": 2.0, "environment": 0.0}
    assert actor.seconds() == expected
    actor.start()  # another process: the seconds of this step are lost with the one before
    assert actor.present() == ("starting", 0.0) and actor.seconds() == expected


def test_steps_are_counted_over_all_processes_of_an_actor(clock: Clock) -> None:
    actor = activity(clock)
    actor.count(3)
    actor.start()
    actor.count(5)
    assert actor.steps() == 8


def test_another_process_reads_the_activity_that_one_writes() -> None:
    ours = SharedActivities(3)
    theirs = SharedActivities(3, ours.descriptor)
    for index, stage in enumerate(("environment", "inference", "queueing")):
        theirs.of(index).enter(stage)
    assert [ours.of(index).present()[0] for index in range(3)] == [
        "environment",
        "inference",
        "queueing",
    ]


def test_time_shares_are_known_however_long_a_rollout_takes(clock: Clock) -> None:
    """No rollout is complete within these 30 seconds."""
    actor, learner, window = activity(clock), LearnerClock(clock), Window()
    actor.start()
    for second in range(30):
        actor.enter("environment" if second % 4 else "inference")
        clock.time += 1.0
        found = window.add(Reading(clock.time, actor.seconds() | learner.seconds()))
    assert found.environment == pytest.approx(0.75, abs=0.06) and found.queueing == 0


# --- actors that hang


class Process:
    def __init__(self) -> None:
        self.given_up: list[str] = []

    def give_up(self, why: str) -> None:
        self.given_up.append(why)


def source(clock: Clock, *stages: str, fixed_lag: int | None = None) -> MonoSource:
    """Returns a source whose actors, without real processes, have just entered these stages."""
    space = ArraySpec((4,), "float32")
    agent = make_agent(ActorSpec("mlp"), space, Discrete(2), 1)
    config = config_of(
        env=EnvSpec("never made"),
        extras=(),
        actor=ActorSpec("mlp"),
        num_actors=len(stages),
        num_processes=len(stages),
        num_buffers=len(stages),
        batch_size=1,
        unroll_length=1,
        fixed_lag=fixed_lag,
    )
    made = MonoSource(agent, SharedWeights(agent.model), torch.device("cpu"), config)
    for actor, stage in zip(made._actors, stages, strict=True):
        process: Any = Process()
        actor.activity._now, actor.process, actor.alive = clock, process, True
        actor.activity.enter(stage)
    return made


def given_up(source: MonoSource) -> list[list[str]]:
    source._give_up_hanging_actors()
    return [process.given_up for process in (actor.process for actor in source._actors)]  # type: ignore


def test_an_actor_in_one_step_for_ten_seconds_is_reported(clock: Clock) -> None:
    mono = source(clock, "environment", "queueing", "starting")
    clock.time = 9.0
    assert mono.hanging() == ""
    clock.time = 75.0
    assert mono.hanging() == (
        "actor 0 has been in one step of its environments for 75 s; "
        "actor 2 has been starting for 75 s"
    )
    mono._actors[0].activity.enter("inference")
    mono._actors[2].alive = False
    assert mono.hanging() == ""


def test_with_a_fixed_lag_the_report_says_why_the_others_wait(clock: Clock) -> None:
    mono = source(clock, "queueing", "environment", fixed_lag=1)
    clock.time = 60.0
    assert mono.hanging() == (
        "actor 1 has been in one step of its environments for 60 s; "
        "with a fixed lag the others wait for its turn"
    )
    assert mono.status()["waiting_actors"] == 1


def test_an_actor_in_one_step_for_ten_minutes_is_given_up(clock: Clock) -> None:
    mono = source(clock, "queueing", "environment", "inference")
    for clock.time in (0.0, 599.0):
        mono._actors[2].activity.enter("environment")
        assert given_up(mono) == [[], [], []]
    clock.time = 600.0
    why = "was given up after 600 s in one step of its environments"
    assert given_up(mono) == [[], [why], []]
