# SPDX-License-Identifier: Apache-2.0
"""A wait for somebody else says what it waits for."""

from __future__ import annotations

import threading
import time

import pytest

from torchbeast.fleets import waiting
from torchbeast.fleets.waiting import Reminder, waiting_for, warn


def test_a_wait_is_reported_after_ten_seconds_and_then_once_a_minute() -> None:
    reminder = Reminder(now=100.0)
    found = [now for now in range(100, 200) if reminder.due(float(now)) is not None]
    assert found == [110, 170]
    reminder.restart(200.0)
    assert reminder.due(209.0) is None


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
