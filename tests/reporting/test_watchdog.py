# SPDX-License-Identifier: Apache-2.0
"""A run without updates reports which queue is empty or full, in the terms of its program."""

from __future__ import annotations

import pytest

from torchbeast.reporting.diagnosis import Watchdog

BATCH_SIZE = 3
POLY = {"learner_queue_size": 0, "inference_queue_size": 0, "live_streams": 2, "lost_streams": 0}
MONO = {"learner_queue_size": 0, "rollout_queue_size": 0, "live_workers": 2, "replaced_workers": 0}

STUCK = [
    (POLY | {"live_streams": 0}, "the streams are starting"),
    (POLY | {"live_streams": 0, "lost_streams": 2}, "all streams are gone"),
    (POLY | {"learner_queue_size": 3}, "the learner does not take it"),
    (POLY | {"inference_queue_size": 1}, "inference does not respond"),
    (POLY, "0 of 3 rollouts of a batch are ready: the environments have not completed a rollout"),
    (POLY | {"learner_queue_size": 2}, "2 of 3 rollouts of a batch are ready: the environments"),
    (
        POLY | {"learner_queue_size": 2, "inference_queue_size": 1},
        "2 of 3 rollouts of a batch are ready: inference does ",
    ),
    (MONO | {"live_workers": 0}, "the workers are starting"),
    (MONO | {"learner_queue_size": 8}, "the learner does not take it"),
    (MONO | {"rollout_queue_size": 4}, "the learner has not returned its last batch"),
    (MONO | {"waiting_workers": 2}, "the learner is computing an update, and all workers wait"),
    (MONO | {"waiting_workers": 1}, "the environments have not completed a rollout"),
    (MONO | {"replay_fill": 0.1}, "the replay, which is still too small"),
    (MONO | {"replay_fill": 0.0}, "the environments have not completed a rollout"),
    ({}, "no worker has collected a batch"),
    (MONO, "0 of 3 rollouts of a batch are ready: the environments have not completed a rollout"),
]


@pytest.mark.parametrize(("status", "suspect"), STUCK)
def test_the_queue_that_is_stuck_is_named(status: dict[str, int], suspect: str) -> None:
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    assert watchdog.check(0, status, 0.0) is None
    said = watchdog.check(0, status, 100.0)
    assert said is not None and suspect in said and said.startswith("no update for 100 s")
    assert all(f"{name} {value}" in said for name, value in status.items())


def test_a_replay_is_not_called_too_small_once_something_was_learnt() -> None:
    watchdog, status = Watchdog(now=0.0, batch_size=BATCH_SIZE), MONO | {"replay_fill": 0.1}
    watchdog.check(1, status, 0.0)
    assert "have not completed a rollout" in (watchdog.check(1, status, 100.0) or "")


def test_a_full_learner_queue_explains_the_queues_before_it() -> None:
    full = MONO | {"learner_queue_size": 16, "rollout_queue_size": 4}
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    watchdog.check(0, full, 0.0)
    assert "the learner does not take it" in (watchdog.check(0, full, 100.0) or "")


def test_files_that_the_learner_waits_for_explain_all_queues() -> None:
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    full = MONO | {"learner_queue_size": 16}
    watchdog.check(0, full, 0.0)
    said = watchdog.check(0, full, 100.0, learner="the learner waits for files in /a")
    assert said and said.startswith("no update for 100 s: the learner waits for files in /a (")


def test_a_stall_is_reported_after_ten_seconds_and_then_once_a_minute() -> None:
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    assert watchdog.check(0, POLY, 1.0) is None
    assert watchdog.check(0, POLY, 10.0) is None
    assert watchdog.check(0, POLY, 11.0) is not None
    assert watchdog.check(0, POLY, 70.0) is None, "once a minute is enough"
    assert "for 70 s" in (watchdog.check(0, POLY, 71.0) or "")
    assert watchdog.check(1, POLY, 200.0) is None, "an update was done"
    assert watchdog.check(1, POLY, 209.0) is None
    watchdog.restart(300.0)  # the caller of a Learner has done something else
    assert watchdog.check(1, POLY, 309.0) is None
    assert watchdog.check(1, POLY, 310.0) is not None


@pytest.mark.parametrize(
    ("status", "count", "said"),
    [
        (POLY, "lost_streams", "3 streams were lost and replaced before completing a rollout"),
        (MONO, "replaced_workers", "3 workers were lost and replaced before completing a rollout"),
    ],
)
def test_streams_lost_since_the_last_update_are_reported(
    status: dict[str, int], count: str, said: str
) -> None:
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    watchdog.check(5, status | {count: 7}, 1.0)
    assert said in (watchdog.check(5, status | {count: 10}, 100.0) or "")
    watchdog.check(6, status | {count: 10}, 101.0)
    assert "have not completed" in (watchdog.check(6, status | {count: 10}, 200.0) or "")


def test_hanging_workers_are_named_in_a_stall_unless_the_learner_causes_it() -> None:
    hangs = "worker 1 has been in one step of its environments for 75 s"
    for size, named in ((0, True), (8, False)):
        watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
        watchdog.check(0, MONO, 0.0)
        said = watchdog.check(0, MONO | {"learner_queue_size": size}, 80.0, hangs)
        assert said is not None and (f"batch are ready: {hangs} (" in said) == named


def test_lost_streams_are_named_instead_of_queues() -> None:
    lost = "Lost 2 of 2 streams (65 s ago): unix:/a.0"
    watchdog = Watchdog(now=0.0, batch_size=BATCH_SIZE)
    watchdog.check(0, POLY, 0.0)
    said = watchdog.check(0, POLY | {"live_streams": 0, "lost_streams": 2}, 80.0, lost)
    assert said is not None and said.startswith(f"no update for 80 s: {lost} (")


def test_hanging_workers_are_reported_once_a_minute_during_updates() -> None:
    watchdog, hangs = Watchdog(now=0.0, batch_size=BATCH_SIZE), "worker 1 hangs"
    said = [watchdog.check(now, MONO, float(now), hangs * (now > 30)) for now in range(150)]
    assert [now for now, sentence in enumerate(said) if sentence] == [80, 140]
    assert set(said) == {None, hangs}
