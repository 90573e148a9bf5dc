# SPDX-License-Identifier: Apache-2.0
"""Logs to Weights & Biases."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.errors import UsageError
from torchbeast.reporting.log_files import LoggedRun


class WandbLogger:
    """Logs a run to a project of Weights & Biases, under its own name.

    Its variables work as always: WANDB_MODE=offline writes files only, which `wandb sync` sends
    later. They are in `wandb/` of the run's folder.
    """

    def __init__(self, project: str, **init: Any) -> None:
        """Prepares logging. init: further arguments of `wandb.init`, such as entity or tags."""
        self._project, self._init = project, init

    def open(self, run: LoggedRun) -> WandbLog:
        """Begins the run there, or goes on with it: a folder is one run, however often resumed.

        Raises UsageError without the package or an account, OSError if it cannot be reached.
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
            "reinit": "create_new",  # beside one that a notebook has begun
            "settings": wandb.Settings(console="off"),  # the display is no log
        }
        try:
            return WandbLog(wandb.init(**of_this_run | self._init))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UsageError(
                f"Weights & Biases: {error}. Call `wandb login`, or set WANDB_MODE=offline"
            ) from error
        except wandb.Error as error:  # such as one of the network
            raise OSError(str(error)) from error


class WandbLog:
    """The log of a run. Used by one thread at a time."""

    def __init__(self, run: Any) -> None:
        """Takes a wandb.Run. Its own step counts calls, so that a resumed run can log again what
        came after the checkpoint; charts are over ours.
        """
        self._run = run
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs each figure but NaN."""
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        self._run.log({"step": step, **known})

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def _id_in(folder: Path) -> str:
    """Returns the run's id, which a file keeps: with a name of the user's, two runs of one project
    might meet, and a run that was deleted there could not be logged again.
    """
    path = folder / "torchbeast_id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8))
    return path.read_text()
