# SPDX-License-Identifier: Apache-2.0
"""Writes a run's checkpoints: periodically, at the end, and the state before a failed update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.errors import RunError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.training import Training
from torchbeast.reporting.run_folder import RunFolder


class CheckpointNotWritten(RunError):
    """A checkpoint could not be written; what was learnt since the last one may be lost."""


class Saving:
    """Writes checkpoints into a run's folder; a no-op if they are disabled."""

    def __init__(self, folder: RunFolder, labels: Mapping[str, Any], disabled: bool) -> None:
        """Prepares saving; labels: constant entries of every checkpoint, such as settings."""
        self._path = folder.checkpoint
        self._labels = labels
        self._disabled = disabled

    def save(self, training: Training) -> None:
        """Writes a checkpoint; on failure raises CheckpointNotWritten and keeps the last one."""
        if self._disabled:
            return
        try:
            checkpoints.save(self._path, training.checkpoint(self._labels))
        except OSError as error:
            raise CheckpointNotWritten(
                f"no checkpoint was written to {self._path} "
                f"({error.strerror or error}); an earlier one is intact: make room there"
            ) from error

    def keep_last_good(self, state: dict[str, Any]) -> Path | None:
        """Saves the state before a failed update in a file of its own; returns its path."""
        if self._disabled:
            return None
        path = self._path.with_name("last_good.tar")
        checkpoints.save(path, {**state, **self._labels})
        return path
