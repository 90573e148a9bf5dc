# SPDX-License-Identifier: Apache-2.0
"""Tests of the watchdog, the display until a run ends, and periodic checkpoints."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.diagnosis import STAGES, UNKNOWN, Diagnosis, Reading
from torchbeast.reporting.display import Progress
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.run import training as training_module
from torchbeast.run import watch
from torchbeast.run.checkpoint_writer import CheckpointNotWritten
from torchbeast.run.training import LearnerClock, PeriodicCheckpoints
from torchbeast.run.watch import RunDisplay, start_watchdog

SOON = 20.0


def plan(suppress_logs: bool = True) -> Any:
    return Mock(display=DisplayConfig(suppress_logs=suppress_logs))


# --- periodic checkpoints


@pytest.mark.parametrize("ends", [False, True])
def test_no_periodic_save_begins_once_the_run_has_ended(ends: bool) -> None:
    training = Mock(supervisor=Mock(ended=ends))
    PeriodicCheckpoints(training, interval_s=0.0)(1, {})
    assert training.save.call_count == (not ends)


def test_the_first_checkpoint_is_written_after_a_minute_of_which_something_was_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the next ones after the interval."""
    saved, clock = [], [0.0]
    monkeypatch.setattr(training_module, "running_time", lambda: clock[0])
    training = Mock(supervisor=Mock(ended=False), save=lambda: saved.append(clock[0]))
    periodic = PeriodicCheckpoints(training, interval_s=600.0)
    for clock[0] in (59.0, 62.0, 63.0, 661.0, 663.0):
        periodic(1, {})
    assert saved == [62.0, 663.0]


def test_a_periodic_checkpoint_that_cannot_be_written_is_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = CheckpointNotWritten("no checkpoint was written to /a")
    training = Mock(supervisor=Mock(ended=False), save=Mock(side_effect=error))
    PeriodicCheckpoints(training, interval_s=0.0)(1, {})
    expected = "Warning: no checkpoint was written to /a; the run continues\n"
    assert capsys.readouterr().err == expected


# --- the watchdog


@pytest.mark.parametrize("what", ["a batch", "a callback", "nothing"])
def test_the_watchdog_warns_while_a_step_waits_for_anything_but_a_callback(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, supervisor, clock = threading.Semaphore(0), Supervisor(), LearnerClock()
    warnings: list[str] = []

    def status() -> dict[str, float]:
        looked.release()
        return {"learner_queue_size": 0, "live_workers": 1}

    def waits_for_files() -> str:
        looked.release()
        return ""

    monkeypatch.setattr("torchbeast.fleets.waiting.WAIT_S", 0.0)
    monkeypatch.setattr(watch, "_LOOK_S", 0.001)
    monkeypatch.setattr(watch, "warn", lambda warning, is_logged: warnings.append(warning))
    training: Any = Mock(supervisor=supervisor, waits_for_files=waits_for_files)
    training.source = Mock(status=status, hanging=lambda: "")
    training.rows = Mock(count=0, clock=clock)
    with (
        nullcontext() if what == "nothing" else clock.steps.running(),
        clock.pauses.running() if what == "a callback" else nullcontext(),
    ):
        start_watchdog(training, batch_size=1)
        for _ in range(6):
            assert looked.acquire(timeout=SOON)
    supervisor.stop("the test is over")
    assert supervisor.join(SOON) == []
    expected = ["no update for 0 s: 0 of 1 rollouts of a batch are ready: the environments have"]
    assert [warning.partition(" not ")[0] for warning in warnings] == expected * (what == "a batch")


# --- the display


@pytest.mark.parametrize(
    ("seconds", "updates", "said"),
    [(20.0, 20, "Overall: busy 0.75.\n"), (19.0, 20, ""), (20.0, 19, "")],
)
def test_the_bottleneck_is_named_at_the_end_of_runs_of_20_seconds_and_updates(
    seconds: float,
    updates: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Since the first update, the learner was busy for three quarters of the time."""
    supervisor = Supervisor()
    readings = iter(
        [
            Reading(0.0, dict.fromkeys(STAGES, 50.0)),
            Reading(seconds, dict.fromkeys(STAGES, 50.0) | {"learning": 53.0, "waiting": 51.0}),
        ]
    )

    def show(*_: Any) -> Reading:
        if (reading := next(readings)).time:
            supervisor.stop("all steps are learnt")
        return reading

    monkeypatch.setattr(RunDisplay, "_show", lambda *shown: None if shown[4:] else show())
    monkeypatch.setattr(
        "torchbeast.reporting.diagnosis.diagnose",
        lambda shares, *_: Diagnosis("learner", f"busy {shares.learning:.2f}"),
    )
    monkeypatch.setattr("torchbeast.run.watch._SHOW_EVERY_S", 0.01)
    training = Mock(
        source=Mock(status=dict, hanging=lambda: "", lost_streams=list),
        supervisor=supervisor,
        rows=Mock(count=updates, newest={}),
    )
    RunDisplay(training=training, plan=plan(suppress_logs=False)).until_the_end()
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("live", [2, 0])
def test_nothing_is_advised_to_a_run_that_has_no_stream_left(
    monkeypatch: pytest.MonkeyPatch, live: int
) -> None:
    advice, display = Diagnosis("environment", "more servers help"), Mock()
    monkeypatch.setattr("torchbeast.reporting.diagnosis.diagnose", lambda *_: advice)
    training = Mock(
        updates=1,
        source=Mock(lost_streams=list),
        rows=Mock(count=1, newest={}, progress=Progress(), steps_here=1),
        writer=Mock(saved_at=0.0, failed=0),
    )
    training.rows.reading.return_value = Reading(0.0, {})
    shown_by = RunDisplay(training=training, plan=plan())
    shown_by._show(display, {"learner_queue_size": 0, "live_streams": live}, Mock())
    (shown,) = display.show.call_args.args
    assert shown.diagnosis == (advice if live else None)


def test_the_age_of_replayed_steps_is_no_policy_lag_to_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchbeast.reporting.diagnosis.diagnose", lambda *arguments: arguments[2])
    training, lags = Mock(rows=Mock(newest={"mean_lag": 14.0})), []
    for is_replay in (False, True):
        learner = Mock(trains_on_any_age=is_replay)
        lags.append(RunDisplay(training=training, plan=Mock(learner=learner))._diagnose(UNKNOWN))
    assert str(lags) == "[14.0, nan]"
