# SPDX-License-Identifier: Apache-2.0
"""The loggers that a run may have in addition to its files: Weights & Biases, and lines on stdout;
and the settings of display and logs.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbeast.core.base.checks import at_least
from torchbeast.errors import UsageError
from torchbeast.reporting.display import line_of
from torchbeast.reporting.log_files import FILES, LoggedRun, Logger


class StdoutLogger:
    """Prints rows of metrics on stdout at intervals; metrics of skipped rows come with the next
    one.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares printing.

        Args:
            names: Names of the metrics to print. None: all.
            every_seconds: Seconds between two rows, at least.
            clock: Returns the time in seconds.
        """
        at_least(0, every_seconds=every_seconds)
        self._names, self._every, self._clock = names, every_seconds, clock

        self._printed = -math.inf
        self._kept: dict[str, float] = {}  # newest values since the last printed row
        self._step = 0

    def open(self, run: LoggedRun) -> StdoutLogger:
        """Starts with the next row."""
        return StdoutLogger(self._names, self._every, self._clock)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Prints a row if it is time, without values that are NaN.

        Args:
            step: Environment steps of the row.
            figures: Its metrics by name.
        """
        self._step = step
        for name, value in figures.items():
            if not math.isnan(value) and (self._names is None or name in self._names):
                self._kept[name] = value
        if self._clock() - self._printed >= self._every:
            self._print()

    def close(self) -> None:
        """Prints the last row, if it was skipped."""
        if self._kept:
            self._print()

    def _print(self) -> None:
        cells = {"step": f"{self._step:,}"} | {k: f"{v:.4g}" for k, v in self._kept.items()}
        print(line_of(cells), flush=True)
        self._printed, self._kept = self._clock(), {}


class WandbLogger:
    """Logs a run to a project of Weights & Biases, under the run's name.

    The environment variables of wandb work as usual: WANDB_MODE=offline only writes files, into
    `wandb/` of the run's folder, which `wandb sync` can send later.
    """

    def __init__(self, project: str, **init: Any) -> None:
        """Prepares logging.

        Args:
            project: The project's name.
            **init: Further arguments of `wandb.init`, such as entity or tags.
        """
        self._project, self._init = project, init

    def open(self, run: LoggedRun) -> WandbLog:
        """Starts the run in Weights & Biases, or continues it if the folder has one.

        Raises UsageError without the package or an account, and OSError if the server is out of
        reach.
        """
        try:
            import wandb
        except ImportError:
            raise UsageError(
                "logging to Weights & Biases needs its package: pip install 'torchbeast[wandb]'"
            ) from None
        of_this_run = {
            "project": self._project,
            "name": run.name,
            "id": _id_in(run.folder / "wandb"),
            "dir": str(run.folder),
            "config": dict(run.settings),
            "allow_val_change": True,  # a resumed run may have other settings
            "resume": "allow",
            "reinit": "create_new",  # in addition to a run of a notebook
            "settings": wandb.Settings(console="off"),  # the display is not a log
        }
        try:
            return WandbLog(wandb.init(**of_this_run | self._init))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UsageError(
                f"Weights & Biases: {error}. Call `wandb login`, or set WANDB_MODE=offline"
            ) from error
        except wandb.Error as error:  # for example of the network
            raise OSError(str(error)) from error


class WandbLog:
    """The log of a run. Used by one thread at a time."""

    def __init__(self, run: Any) -> None:
        """run: a wandb.Run. Its own step counts calls, so that a resumed run can log steps after
        the checkpoint again. Charts use our step as x axis.
        """
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs each metric except NaN."""
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        self._run.log({"step": step, **known})

    def close(self) -> None:
        """Waits until everything has been sent."""
        self._run.finish()


def _id_in(folder: Path) -> str:
    """Returns the run's random ID, which is kept in a file.

    If the ID were the name of the run, two runs of a project could collide, and a run that was
    deleted there could not be logged again.
    """
    path = folder / "torchbeast_id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8))
    return path.read_text()


@dataclass(frozen=True, kw_only=True)
class DisplayConfig:
    """The display in the terminal."""

    episodes_for_avg: int = 100
    """Show the mean return and length of this many last episodes."""
    suppress_logs: bool = False
    """Show only the start, warnings and the summary on the terminal, not the progress. The run's
    files are written as usual."""

    def __post_init__(self) -> None:
        at_least(1, episodes_for_avg=self.episodes_for_avg)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Loggers in addition to logs.csv and TensorBoard."""

    wandb_project: str | None = None
    """Also log to this project of Weights & Biases (pip install 'torchbeast[wandb]'). With the
    environment variable WANDB_MODE=offline it only writes files. Default: off."""

    def loggers(self) -> tuple[Logger, ...]:
        """Returns the loggers of the run."""
        if self.wandb_project is None:
            return FILES
        return (*FILES, WandbLogger(self.wandb_project))
