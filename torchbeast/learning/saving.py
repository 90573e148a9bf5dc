# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: written now and then, at the end, and before an update that failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.errors import RunError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.training import Training
from torchbeast.reporting.run_folder import RunFolder


class CheckpointNotWritten(RunError):
    """What was learnt since the checkpoint before may be lost."""


class Saving:
    """Writes into a run's folder; a no-op where checkpoints are disabled."""

    def __init__(self, folder: RunFolder, labels: Mapping[str, Any], disabled: bool) -> None:
        """labels: what does not change while the run learns, such as its settings."""
        self._path = folder.checkpoint
        self._labels = labels
        self._disabled = disabled

    def save(self, training: Training) -> None:
        """Writes a checkpoint; CheckpointNotWritten, with the one before intact, if it cannot."""
        if self._disabled:
            return
        try:
            checkpoints.save(self._path, training.checkpoint(self._labels))
        except OSError as error:
            raise CheckpointNotWritten(
                f"no checkpoint was written to {self._path} ({error.strerror or error}), the one "
                "before it, if there was one, is as it was: make room there"
            ) from error

    def keep_last_good(self, state: dict[str, Any]) -> Path | None:
        """Saves the state before an update that failed apart from the checkpoint; says where."""
        if self._disabled:
            return None
        path = self._path.with_name("last_good.tar")
        checkpoints.save(path, {**state, **self._labels})
        return path
