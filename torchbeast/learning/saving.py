# SPDX-License-Identifier: Apache-2.0
"""Writes a run's checkpoints: periodically, at the end, and the state before a failed update."""

from __future__ import annotations

import errno
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torchbeast.errors import RunError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.training import Training
from torchbeast.processes.system import in_bytes
from torchbeast.reporting.run_folder import RunFolder, replaced_atomically

REPLAY = "replay.bin"
"""Name of the file beside the checkpoint with the contents of the replay."""


class SavedReplay(Protocol):
    """A replay that is saved with every checkpoint."""

    @property
    def inserted(self) -> int:
        """Steps inserted so far."""

    def save_replay(self, file: BinaryIO) -> None:
        """Writes the contents to a file."""


class CheckpointNotWritten(RunError):
    """A checkpoint could not be written; what was learnt since the last one may be lost."""


class Saving:
    """Writes checkpoints into a run's folder; a no-op if they are disabled."""

    def __init__(
        self,
        folder: RunFolder,
        labels: Mapping[str, Any],
        disabled: bool,
        replay: SavedReplay | None = None,
        also: Callable[[], Mapping[str, Any]] = dict,
        *,
        keep: int = 1,
    ) -> None:
        """Prepares saving.

        labels: constant entries of every checkpoint, such as settings. replay: saved with every
            checkpoint, if anything was inserted since the last; None: there is none to save.
        also: returns further entries of every checkpoint; called by the thread that saves it.
        keep: number of checkpoints that are kept.
        """
        self._path = folder.checkpoint
        self._labels = labels
        self._also = also
        self._disabled = disabled
        self._keep = keep
        self._replay = replay
        self._replay_path = self._path.with_name(REPLAY)
        self._inserted: int | None = None  # steps in what is saved; None: nothing was saved here
        self.saved_at = math.nan  # Unix time of the last checkpoint; NaN: none was written here
        self.failed = 0  # number of checkpoints that could not be written as a whole

    def save(self, training: Training, wait_s: float | None = None) -> None:
        """Writes a checkpoint, then the replay; a no-op before anything was learnt.

        On failure raises CheckpointNotWritten and keeps the last one of what was not written.
        wait_s: see Training.checkpoint, which raises NoMoment.
        """
        if self._disabled or not training.updates:
            return
        try:
            self._save(training, wait_s)
        except CheckpointNotWritten:
            self.failed += 1
            raise
        self.saved_at = time.time()

    def checkpoint(self, training: Training, wait_s: float | None = None) -> dict[str, Any]:
        """Returns everything that a resumed run needs, without the replay."""
        return {**training.checkpoint(self._labels, wait_s), **self._also()}

    def _save(self, training: Training, wait_s: float | None) -> None:
        data = checkpoints.as_bytes(self.checkpoint(training, wait_s))
        try:
            checkpoints.write_newest(self._path, data, self._keep)
        except OSError as error:
            old = "an earlier one is intact" if self._path.exists() else "there is none yet"
            raise CheckpointNotWritten(
                f"no checkpoint was written to {self._path} ({error.strerror or error}); {old}"
                f"{self._room(error, ' for ' + in_bytes(len(data)))}"
            ) from error
        if self._replay is not None and self._replay.inserted != self._inserted:
            self._save_replay(self._replay)

    def _save_replay(self, replay: SavedReplay) -> None:
        inserted = replay.inserted  # before: where more is inserted meanwhile, it is saved again
        try:
            with replaced_atomically(self._replay_path) as file:
                replay.save_replay(file)
        except OSError as error:
            old = "an earlier one is intact" if self._replay_path.exists() else "there is none"
            raise CheckpointNotWritten(
                f"the checkpoint {self._path} is new, but no replay was written to "
                f"{self._replay_path} ({error.strerror or error}); {old}{self._room(error)}"
            ) from error
        self._inserted = inserted

    def _room(self, error: OSError, needed: str = "") -> str:
        """Says how much room is needed and there is, if too little of it is the error."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        free = in_bytes(shutil.disk_usage(self._path.parent).free)
        return f": make room there{needed}, {free} are free"

    def keep_last_good(self, state: dict[str, Any]) -> Path | None:
        """Saves the state before a failed update in a file of its own; returns its path."""
        if self._disabled:
            return None
        path = self._path.with_name("last_good.tar")
        checkpoints.save(path, {**state, **self._labels})
        return path
