# SPDX-License-Identifier: Apache-2.0
"""Prints the figures of a run as plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping

from torchbeast.core.checks import at_least
from torchbeast.reporting.display import line_of
from torchbeast.reporting.log_files import LoggedRun


class StdoutLogger:
    """Prints rows of figures on stdout, at most one every `every_seconds`."""

    def __init__(
        self,
        names: Collection[str] | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares printing. names: of the figures that are printed; None: all."""
        at_least(0, every_seconds=every_seconds)
        self._names, self._every, self._clock = names, every_seconds, clock

    def open(self, run: LoggedRun) -> StdoutLog:
        """Begins with the next row."""
        return StdoutLog(self._names, self._every, self._clock)


class StdoutLog:
    """The printed rows of a run. Figures of rows that are left out come with the next one."""

    def __init__(
        self, names: Collection[str] | None, every_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._names, self._every, self._clock = names, every_seconds, clock
        self._printed = -math.inf
        self._kept: dict[str, float] = {}  # the newest of each figure, since the last line
        self._step = 0

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Prints a row if it is time. NaN is left out."""
        self._step = step
        for name, value in figures.items():
            if not math.isnan(value) and (self._names is None or name in self._names):
                self._kept[name] = value
        if self._clock() - self._printed >= self._every:
            self._print()

    def close(self) -> None:
        """Prints the last row, if it was left out."""
        if self._kept:
            self._print()

    def _print(self) -> None:
        cells = {"step": f"{self._step:,}"} | {k: f"{v:.4g}" for k, v in self._kept.items()}
        print(line_of(cells), flush=True)
        self._printed, self._kept = self._clock(), {}
