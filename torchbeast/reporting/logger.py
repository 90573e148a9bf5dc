# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that logs the figures of a run: files, TensorBoard, services.

Logger  -- open(run) -->  Log  -- write(step, figures), once per update -->  close()
settings, reusable        one part of a run, from its start to its end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run that a logger logs."""

    folder: Path
    settings: Mapping[str, Any]  # by the names of flags
    step: int  # env steps of the checkpoint that it goes on from; 0 for a new run

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.folder.name


class Log(Protocol):
    """The open log of a run. Used by one thread at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the figures after `step` env steps; NaN means that there is none."""

    def close(self) -> None:
        """Writes what is left. No method may be called afterwards."""


class Logger(Protocol):
    """Opens the log of a run."""

    def open(self, run: LoggedRun) -> Log:
        """Opens the log. Raises UsageError with what to install or to change."""


class Logs:
    """Several logs as one."""

    def __init__(self, loggers: Sequence[Logger], run: LoggedRun) -> None:
        """Opens them in order; if one cannot be opened, closes the others."""
        with ExitStack() as opened:
            self._logs = [_closed_by(opened, logger.open(run)) for logger in loggers]
            self._opened = opened.pop_all()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Writes to each."""
        for log in self._logs:
            log.write(step, figures)

    def close(self) -> None:
        """Closes each, even if one raises; the last one first."""
        self._opened.close()


def _closed_by(stack: ExitStack, log: Log) -> Log:
    stack.callback(log.close)
    return log
