# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints during training, and keeps them under names; refuses a log without one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torchbeast.core.checks import at_least
from torchbeast.errors import UsageError
from torchbeast.learner.callback import Callback, Schedule
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.saving import CheckpointNotWritten
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import is_in_use

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner

_log = logging.getLogger("torchbeast.learner")


class Checkpoints(Callback):
    """Writes model.tar every so often, and keeps a copy as checkpoints/STEPS.tar in log_dir.

    A checkpoint that cannot be written, as on a full disk, is a warning; the run goes on.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        *,
        every_seconds: float | None = None,
        keep: int | None = None,
    ) -> None:
        """Takes either every_steps, in env steps, or every_seconds.

        keep: number of copies; older ones are removed. 0: only model.tar is written. None: all.
        """
        at_least(0, keep=keep)
        self._schedule = Schedule(every_steps, every_seconds)
        self._keep = keep

    def on_start(self, learner: Learner) -> None:
        """Begins to wait."""
        self._schedule.mark(learner.steps)

    def on_step(self, learner: Learner, figures: dict[str, float]) -> None:
        """Writes a checkpoint if it is time."""
        if self._schedule.is_due(learner.steps) or learner.done():
            try:
                self._write(learner)
            except (CheckpointNotWritten, OSError) as error:
                _log.warning("%s; the run goes on", error)
            self._schedule.mark(learner.steps)

    def _write(self, learner: Learner) -> None:
        learner.save_model()
        if self._keep == 0:
            return
        folder = learner.log_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        learner.save_model(folder / f"{learner.steps:012d}.tar")
        for old in _numbered(folder)[: -self._keep] if self._keep else ():
            old.unlink()


def check_goes_on(log_dir: Path) -> None:
    """Raises UsageError for a log of which there is no checkpoint: a new run would replace it.

    A folder that another process uses is refused elsewhere.
    """
    if checkpoints.existing(log_dir / "model.tar") or not (log_dir / "logs.csv").exists():
        return
    if not is_in_use(log_dir) and next(read_logs(log_dir), None) is not None:
        raise UsageError(
            f"{log_dir} has the log of a run but no model.tar to go on from, as after a run that "
            "was not closed: give another log_dir, or remove logs.csv there to begin anew"
        )


def _numbered(folder: Path) -> list[Path]:
    """Returns the copies, those of the fewest steps first."""
    return sorted((p for p in folder.glob("*.tar") if p.stem.isdigit()), key=lambda p: int(p.stem))
