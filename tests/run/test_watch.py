# SPDX-License-Identifier: Apache-2.0
"""Tests of the main thread until a run ends."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.diagnosis import STAGES, Diagnosis, Reading
from torchbeast.reporting.display import Progress
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.run.training import NoMoment
from torchbeast.run.watch import Watch

IDLE = Mock(status=lambda: {"learner_queue_size": 0}, hanging=lambda: "")


def run(save_every_s: float = 600.0, suppress_logs: bool = True) -> Any:
    """A run with these settings, whose batches have one rollout."""
    settings = Mock(
        checkpoints=Mock(checkpoint_interval=save_every_s),
        display=DisplayConfig(suppress_logs=suppress_logs),
    )
    return Mock(settings=settings, rollouts_at_once=1)


@pytest.mark.parametrize("ends", [False, True])
def test_no_periodic_save_begins_once_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The run ends while the main thread shows it."""
    supervisor, checkpoint_writer = Supervisor(), Mock()

    def show(*_: object) -> None:
        if ends or checkpoint_writer.save.called:
            supervisor.stop("all steps are learnt")

    monkeypatch.setattr(Watch, "_show", show)
    monkeypatch.setattr("torchbeast.run.watch._SHOW_EVERY_S", 0.01)
    watch = Watch(
        training=Mock(updates_here=1, source=IDLE, supervisor=supervisor),
        checkpoint_writer=checkpoint_writer,
        run=run(save_every_s=0.0),
    )
    watch.until_the_end()
    assert checkpoint_writer.save.call_count == (not ends)


def test_a_checkpoint_that_is_due_in_a_long_update_is_tried_until_there_is_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And, once it is written, again after the interval only."""
    supervisor, checkpoint_writer, clock = Supervisor(), Mock(), iter([0.0, 0.0])
    checkpoint_writer.save.side_effect = [
        NoMoment("an update"),
        NoMoment("an update"),
        None,
        None,
        None,
    ]
    rounds = iter(range(7))

    def show(*_: object) -> None:
        if next(rounds, None) is None:
            supervisor.stop("all steps are learnt")

    monkeypatch.setattr("torchbeast.run.watch.running_time", lambda: next(clock, 1000.0))
    monkeypatch.setattr("torchbeast.run.watch._SHOW_EVERY_S", 0.01)
    monkeypatch.setattr(Watch, "_show", show)
    watch = Watch(
        training=Mock(updates_here=1, source=IDLE, supervisor=supervisor),
        checkpoint_writer=checkpoint_writer,
        run=run(save_every_s=600.0),
    )
    watch.until_the_end()
    assert supervisor.failure is None and checkpoint_writer.save.call_count == 3


def test_the_first_checkpoint_is_written_after_a_minute_of_which_something_was_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, checkpoint_writer, times = (
        Supervisor(),
        Mock(),
        iter([0.0, 59.0, 61.0, 62.0, 660.0, 663.0]),
    )
    clock, saved = [0.0], []

    def status() -> dict[str, int]:
        clock[0] = next(times, 0.0)
        training.updates_here = int(clock[0] > 61.0)
        return {"learner_queue_size": 0}

    def show(*_: object) -> None:
        if not clock[0]:
            supervisor.stop("all steps are learnt")

    source = Mock(status=status, hanging=lambda: "")
    training = Mock(updates_here=0, source=source, supervisor=supervisor)
    checkpoint_writer.save.side_effect = lambda *_: saved.append(clock[0])
    monkeypatch.setattr("torchbeast.run.watch.running_time", lambda: clock[0])
    monkeypatch.setattr("torchbeast.run.watch._SHOW_EVERY_S", 0.01)
    monkeypatch.setattr(Watch, "_show", show)
    Watch(
        training=training,
        checkpoint_writer=checkpoint_writer,
        run=run(save_every_s=600.0),
    ).until_the_end()
    assert saved == [62.0, 663.0]


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
    monkeypatch.setattr(Watch, "_show", lambda *_: supervisor.stop("all steps are learnt"))
    monkeypatch.setattr(
        "torchbeast.run.watch.diagnose",
        lambda shares, _: Diagnosis("learner", f"busy {shares.learning:.2f}"),
    )
    monkeypatch.setattr("torchbeast.run.watch._SHOW_EVERY_S", 0.01)
    watch = Watch(
        training=Mock(
            updates_here=updates,
            source=Mock(status=dict, hanging=lambda: "", lost_streams=list),
            supervisor=supervisor,
            reading=lambda: next(readings),
        ),
        checkpoint_writer=Mock(),
        run=run(suppress_logs=False),
    )
    watch.until_the_end()
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("live", [2, 0])
def test_nothing_is_advised_to_a_run_that_has_no_stream_left(
    monkeypatch: pytest.MonkeyPatch, live: int
) -> None:
    advice, display = Diagnosis("environment", "more servers help"), Mock()
    monkeypatch.setattr("torchbeast.run.watch.diagnose", lambda *_: advice)
    source = Mock(lost_streams=list)
    training = Mock(
        updates_here=1, updates=1, progress=Progress(), metrics={}, source=source, total_steps=1
    )
    training.reading.return_value = Reading(0.0, {})
    watch = Watch(
        training=training,
        checkpoint_writer=Mock(saved_at=0.0, failed=0),
        run=run(),
    )
    watch._show(display, {"learner_queue_size": 0, "live_streams": live}, Mock())
    (shown,) = display.show.call_args.args
    assert shown.diagnosis == (advice if live else None)
