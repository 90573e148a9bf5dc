# SPDX-License-Identifier: Apache-2.0
"""Logs to TensorBoard: event files in the run's folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchbeast.reporting.log_files import LoggedRun
from torchbeast.reporting.output import WallTime


class TensorBoardLogger:
    """Writes TensorBoard events into the run's folder, if TensorBoard is installed."""

    def open(self, run: LoggedRun) -> TensorBoardLog:
        """Opens the events of a run; those after the checkpoint that it goes on from are hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return TensorBoardLog(None)
        return TensorBoardLog(SummaryWriter(str(run.folder), purge_step=run.step + 1))


class TensorBoardLog:
    """The events of a run. Used by one thread at a time."""

    def __init__(self, writer: Any | None) -> None:
        """Takes a SummaryWriter; without one nothing is written."""
        self._writer, self._time = writer, WallTime()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds a scalar for each figure but NaN.

        Raises OSError once the writer's thread has met one, and from then on: it writes no more.
        """
        if self._writer is None:
            return
        try:
            now = self._time.now()
            for name, value in figures.items():
                if not math.isnan(value):
                    self._writer.add_scalar(name, value, step, walltime=now)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "TensorBoard's file of events") from error

    def close(self) -> None:
        """Writes the last events."""
        if self._writer is not None:
            self._writer.close()
