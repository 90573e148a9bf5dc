# SPDX-License-Identifier: Apache-2.0
"""Settings of what a run shows on the terminal, and where it is logged."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least
from torchbeast.reporting.log_files import CsvLogger, Logger
from torchbeast.reporting.tensorboard import TensorBoardLogger

FILES: tuple[Logger, ...] = (CsvLogger(), TensorBoardLogger())
"""The loggers of every run."""


@dataclass(frozen=True, kw_only=True)
class DisplayConfig:
    """Display in the terminal."""

    episodes_for_avg: int = 100
    """Number of the last episodes over which the mean return and length are shown."""
    suppress_logs: bool = False
    """Show no progress on the terminal, only the start, warnings and the summary. The files of the
    run are written as always."""

    def __post_init__(self) -> None:
        at_least(1, episodes_for_avg=self.episodes_for_avg)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs beside logs.csv and TensorBoard's."""

    wandb_project: str | None = None
    """Also log the run to this project of Weights & Biases (pip install 'torchbeast[wandb]').
    WANDB_MODE=offline in the environment writes files only. Default: do not."""

    def loggers(self) -> tuple[Logger, ...]:
        """Returns the loggers of the run."""
        if self.wandb_project is None:
            return FILES
        from torchbeast.reporting.weights_and_biases import WandbLogger

        return (*FILES, WandbLogger(self.wandb_project))
