# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that logs the figures of a run: files, TensorBoard, services.

Logger  -- open(run) -->  Log  -- write(step, figures), once per update -->  close()
settings, reusable        one part of a run, from its start to its end
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger("torchbeast.logs")


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
        """Opens the log.

        Raises UsageError with what to install or to change, which ends the run. Without a log that
        raises OSError or UnicodeError here the run continues.
        """


class Logs:
    """Several logs as one. Where one cannot be written, as on a full disk, the run goes on."""

    def __init__(self, loggers: Sequence[Logger], run: LoggedRun) -> None:
        """Opens them in order; if one ends the run, closes the others."""
        self._logs: list[Log] = []
        with ExitStack() as opened:
            for logger in loggers:
                if (log := _opened(logger, run)) is not None:
                    self._logs.append(_closed_by(opened, _Lossy(log)))
            self._opened = opened.pop_all()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Writes to each."""
        for log in self._logs:
            log.write(step, figures)

    def close(self) -> None:
        """Closes each, even if one raises; the last one first."""
        self._opened.close()


class _Lossy:
    """A log that loses rows where it raises OSError, and says which."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # Env steps of the first lost row; None: the last row was written.
        self._since: int | None = None
        self._lost = 0  # rows
        self._what = ""  # cannot be written

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        try:
            self._log.write(step, figures)
        except OSError as error:
            self._lose(step, error)
        else:
            self._say_lost(f"it is written again at step {step:,}")

    def close(self) -> None:
        try:
            self._log.close()
        except OSError as error:
            why = error.strerror or error
            _log.warning("%s was not closed in order (%s)", self._name(error), why)
        self._say_lost("the run has ended")

    def _lose(self, step: int, error: OSError) -> None:
        self._lost += 1
        if self._since is None:
            self._since, self._what = step, self._name(error)
            _log.warning(
                "%s cannot be written (%s): rows are lost from step %s on; the run goes on",
                self._what,
                error.strerror or error,
                f"{step:,}",
            )

    def _say_lost(self, then: str) -> None:
        if self._since is not None:
            said = f"{self._what} lost {self._lost:,} rows from step {self._since:,} on; {then}"
            _log.warning(said)
        self._since, self._lost = None, 0

    def _name(self, error: OSError) -> str:
        """Returns the file that the error names, or else the kind of log."""
        return str(error.filename or type(self._log).__name__)


def _opened(logger: Logger, run: LoggedRun) -> Log | None:
    """Opens a log; warns and returns None if the run has to do without it."""
    try:
        return logger.open(run)
    except (OSError, UnicodeError) as error:
        name = type(logger).__name__
        _log.warning("%s cannot log this run: %s. The run continues without it", name, error)
        return None


def _closed_by(stack: ExitStack, log: Log) -> Log:
    stack.callback(log.close)
    return log
