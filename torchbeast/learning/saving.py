# SPDX-License-Identifier: Apache-2.0
"""Writes a run's checkpoints: periodically, at the end, and the state before a failed update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torchbeast.errors import RunError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.replay import FILE
from torchbeast.learning.training import Training
from torchbeast.reporting.run_folder import RunFolder, replaced_atomically

SaveReplay = Callable[[BinaryIO], None]
"""Writes a replay's contents to a file."""


class CheckpointNotWritten(RunError):
    """A checkpoint could not be written; what was learnt since the last one may be lost."""


class Saving:
    """Writes checkpoints into a run's folder; a no-op if they are disabled."""

    def __init__(
        self,
        folder: RunFolder,
        labels: Mapping[str, Any],
        disabled: bool,
        save_replay: SaveReplay | None = None,
    ) -> None:
        """Prepares saving.

        labels: constant entries of every checkpoint, such as settings. save_replay: called with
            the file of the replay at every checkpoint; None: it is not saved.
        """
        self._path = folder.checkpoint
        self._labels = labels
        self._disabled = disabled
        self._save_replay = save_replay

    def save(self, training: Training) -> None:
        """Writes a checkpoint; a no-op before anything was learnt.

        On failure raises CheckpointNotWritten and keeps the last one.
        """
        if self._disabled or not training.updates:
            return
        try:
            checkpoints.save(self._path, training.checkpoint(self._labels))
            if self._save_replay is not None:
                with replaced_atomically(self._path.with_name(FILE)) as file:
                    self._save_replay(file)
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
