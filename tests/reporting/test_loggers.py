# SPDX-License-Identifier: Apache-2.0
"""Everything that logs a run has one interface: it is opened, gets rows, and is closed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchbeast.reporting.logger import LoggedRun, Logs
from torchbeast.reporting.tensorboard import TensorBoardLogger


def run_in(folder: Path, step: int = 0, **settings: Any) -> LoggedRun:
    return LoggedRun(folder=folder, settings=settings, step=step)


class Noted:
    """A logger, and its own log, that notes what is called."""

    def __init__(self, name: str, calls: list[Any], fails: str = "") -> None:
        self.name, self.calls, self.fails = name, calls, fails

    def _note(self, what: str, *more: Any) -> None:
        self.calls.append((self.name, what, *more))
        if what == self.fails:
            raise OSError(what)

    def open(self, run: LoggedRun) -> Noted:
        self._note("open", run.name)
        return self

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._note("write", step, dict(figures))

    def close(self) -> None:
        self._note("close")


def test_every_log_gets_every_row(tmp_path: Path) -> None:
    calls: list[Any] = []
    logs = Logs([Noted("a", calls), Noted("b", calls)], run_in(tmp_path / "mine"))
    logs.write(10, {"loss": 1.0})
    logs.close()
    assert calls == [
        *[("a", "open", "mine"), ("b", "open", "mine")],
        *[("a", "write", 10, {"loss": 1.0}), ("b", "write", 10, {"loss": 1.0})],
        *[("b", "close"), ("a", "close")],
    ]


def test_logs_are_closed_when_a_later_one_cannot_be_opened(tmp_path: Path) -> None:
    calls: list[Any] = []
    with pytest.raises(OSError):
        Logs([Noted("a", calls), Noted("b", calls, fails="open")], run_in(tmp_path))
    assert calls[-1] == ("a", "close")


def test_logs_are_closed_when_another_one_cannot_be(tmp_path: Path) -> None:
    calls: list[Any] = []
    logs = Logs([Noted("a", calls), Noted("b", calls, fails="close")], run_in(tmp_path))
    with pytest.raises(OSError):
        logs.close()
    assert calls[-1] == ("a", "close")


# --- TensorBoard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Reads events as TensorBoard does."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_each_figure_and_hides_those_after_the_checkpoint(
    tmp_path: Path,
) -> None:
    log = TensorBoardLogger().open(run_in(tmp_path))
    for step in (10, 20, 30):
        log.write(step, {"loss": float(step), "lag": float("nan")})
    log.close()
    assert scalars(tmp_path, "loss") == [(10, 10.0), (20, 20.0), (30, 30.0)]
    resumed = TensorBoardLogger().open(run_in(tmp_path, step=20))
    resumed.write(25, {"loss": 1.0})
    resumed.close()
    assert scalars(tmp_path, "loss") == [(10, 10.0), (20, 20.0), (25, 1.0)]
