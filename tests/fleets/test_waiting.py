# SPDX-License-Identifier: Apache-2.0
"""A wait for somebody else says what it waits for."""

from __future__ import annotations

import threading
import time

import pytest

from torchbeast.fleets import waiting
from torchbeast.fleets.waiting import Reminder, RunningClock, Timer, wait_until, waiting_for, warn


def test_a_wait_is_reported_after_ten_seconds_and_then_once_a_minute() -> None:
    reminder = Reminder(now=100.0)
    found = [now for now in range(100, 200) if reminder.due(float(now)) is not None]
    assert found == [110, 170]
    reminder.restart(200.0)
    assert reminder.due(209.0) is None


def test_a_clock_stands_still_while_the_process_does_not_run() -> None:
    now = [100.0]
    clock = RunningClock(lambda: now[0])
    for _ in range(600):
        now[0] += 1.0
        clock()
    assert clock() == 700.0
    now[0] += 3600.0  # SIGSTOP, a container's freezer, a suspended job
    assert 700.0 <= clock() <= 705.0


def test_a_signal_handler_may_read_the_clock_during_a_reading() -> None:
    """The handler of a script may close its Learner, for example."""
    interrupted: list[float] = []

    def now() -> float:
        if reading.is_set():
            reading.clear()
            interrupted.append(clock())
        return 100.0

    reading = threading.Event()
    clock = RunningClock(now)
    reading.set()
    thread = threading.Thread(target=lambda: interrupted.append(clock()), daemon=True)
    thread.start()
    thread.join(10)
    assert interrupted == [100.0, 100.0]


@pytest.fixture
def stopped_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that an hour passes between two readings."""
    now = [0.0]

    def read() -> float:
        now[0] += 3600.0
        return now[0]

    monkeypatch.setattr(waiting, "running_time", RunningClock(read))
    monkeypatch.setattr(waiting, "_LOOK_S", 0.001)
    return now


def test_a_deadline_does_not_pass_while_the_process_does_not_run(
    stopped_for_an_hour: list[float],
) -> None:
    waits: list[float] = []
    assert not wait_until(waiting.running_time() + 60.0, lambda s: bool(waits.append(s)))
    assert len(waits) == 12, "an hour counts as the five seconds in which it may have run"
    assert wait_until(0.0, lambda seconds: seconds == 0.0), "it looks once in any case"


def test_a_timer_waits_for_its_seconds_of_running_time(stopped_for_an_hour: list[float]) -> None:
    fired = threading.Event()
    timer = Timer(60.0, fired.set)
    timer.start()
    assert fired.wait(10)
    assert stopped_for_an_hour[0] >= 12 * 3600.0
    cancelled = Timer(1e9, fired.clear)
    cancelled.start()
    cancelled.cancel()
    cancelled.join(10)
    assert fired.is_set() and not cancelled.is_alive()


def test_a_block_that_waits_long_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    said, found = threading.Event(), []
    monkeypatch.setattr(waiting, "WAIT_S", 0.0)
    monkeypatch.setattr(waiting, "_LOOK_S", 0.001)
    monkeypatch.setattr(waiting, "warn", lambda sentence, _: (found.append(sentence), said.set()))
    with waiting_for("the shared replay"):
        assert said.wait(10)
    assert found == ["waiting for the shared replay, for 0 s so far"]


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_warning_is_printed_before_a_log_can_hang(
    is_logged: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []  # when the log was written
    monkeypatch.setattr(waiting._log, "info", lambda *_: printed.append(capfd.readouterr().err))
    warn("it stalls", is_logged)
    assert printed == (["Warning: it stalls\n"] if is_logged else [])


def test_a_block_that_ends_soon_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with waiting_for("nobody"):
        pass
    assert capfd.readouterr().err == "" and time.monotonic() - began < waiting._LOOK_S
