# SPDX-License-Identifier: Apache-2.0
"""Writes a run's checkpoints: periodically, at the end, and the state before a failed update; and
the versions for self-play.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchbeast.core.actors.contract import Agent
from torchbeast.errors import RunError, UsageError, refusing_paths
from torchbeast.fleets.system import in_bytes, reserved_files
from torchbeast.fleets.waiting import waiting_for, warn
from torchbeast.reporting.run_folder import RunFolder, replaced_atomically
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import CheckpointConfig

if TYPE_CHECKING:  # only programs with a replay import it
    from torchbeast.core.storages.replay.store import RolloutStore

REPLAY = "replay.bin"
"""Name of the file with the contents of the replay, next to the checkpoint."""


class CheckpointNotWritten(RunError):
    """A checkpoint could not be written, so progress since the last one may be lost."""


@dataclass
class CheckpointWriter:
    """Writes checkpoints into a run's folder; does nothing if they are disabled.

    labels: constant entries of every checkpoint, such as settings. replay: saved with every
    checkpoint if something was inserted since the last one; None: do not save a replay. also:
    returns further entries of a checkpoint; called in the thread that saves it.
    """

    folder: RunFolder
    labels: Mapping[str, Any]
    config: CheckpointConfig
    replay: RolloutStore | None = None
    also: Callable[[], Mapping[str, Any]] = dict

    def __post_init__(self) -> None:
        self._path = self.folder.checkpoint
        self._inserted: int | None = None  # `inserted` of the saved replay; None: not saved yet
        self.saved_at = math.nan  # Unix time of the last checkpoint; NaN: none so far
        self.failed = 0  # number of checkpoints that could not be written completely

    def save(self, checkpoint: Callable[[], Mapping[str, Any]]) -> None:
        """Writes a checkpoint, then the replay.

        checkpoint: returns its contents. Raises CheckpointNotWritten on failure; the previous files
        then stay. Raises RunError if another process uses the folder.
        """
        if self.config.disable_checkpoint:
            return
        contents = checkpoint()
        with reserved_files():
            data = checkpoints.as_bytes(contents)  # torch imports modules for it
        failing = self._failing("no checkpoint was written to", self._path, len(data))
        files = f"files in {self._path.parent}"
        with failing, waiting_for(files, is_logged=False), reserved_files():
            self.folder.check_is_ours()
            checkpoints.write_newest(self._path, data, self.config.keep_checkpoints)
        self._save_replay()
        self.saved_at = time.time()

    def _save_replay(self) -> None:
        if self.replay is None or self.replay.inserted == self._inserted:
            return
        inserted = self.replay.inserted  # steps that are inserted meanwhile are saved again
        path = self._path.with_name(REPLAY)
        what = f"the checkpoint {self._path} is new, but no replay was written to"
        with self._failing(what, path), replaced_atomically(path) as file, self.replay.lock:
            self.replay.save(file)
        self._inserted = inserted

    @contextmanager
    def _failing(self, what: str, path: Path, needed: int = 0) -> Iterator[None]:
        """Converts an OSError to CheckpointNotWritten; needed: bytes on the disk; 0: unknown."""
        try:
            yield
        except OSError as error:
            self.failed += 1
            old = "an earlier one is intact" if path.exists() else "there is none yet"
            room = ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                room = f": {_remedy(path.parent, error.errno, needed)}"
            raise CheckpointNotWritten(
                f"{what} {path} ({error.strerror or error}); {old}{room}"
            ) from error

    def keep_last_good(self, state_of: Callable[[], Mapping[str, Any]]) -> str:
        """Saves the state before a failed update in a separate file; returns a message."""
        path = self._path.with_name("last_good.tar")
        try:
            state = state_of()
            if (name := checkpoints.first_non_finite_tensor(state)) is not None:
                return f"{name} was already not finite, so the previous state was not saved"
            if self.config.disable_checkpoint:
                return "No state was saved"
            checkpoints.save(path, {**state, **self.labels, **self.also()})
        except Exception as error:  # of lost workers, callbacks, the disk; the update's comes first
            return f"The previous state could not be saved: {error}"
        return f"The previous state is in {path}; the checkpoint is unchanged"


def _remedy(folder: Path, error: int, needed: int) -> str:
    """Returns what to do when a file system is full; needed: bytes, or 0 if unknown."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if found.f_files and not found.f_favail:
        return "delete files there, because the file system has no free inodes"
    if error == errno.EDQUOT or free > 2 * needed > 0:
        return "delete files there, because a quota is used up (of bytes or of files)"
    size = f" for {in_bytes(needed)}" if needed else ""
    return f"free some space there{size}, {in_bytes(free)} are free"


@contextmanager
def failing_is_a_warning() -> Iterator[None]:
    """Warns about a checkpoint that cannot be written. A full disk may have room the next time."""
    try:
        yield
    except (CheckpointNotWritten, OSError) as error:
        warn(f"{error}; the run continues")


@dataclass
class PastVersions:
    """Writes versions of the agent into the folder of self-play; see core/actors/self_play.py.

    every: environment steps between two versions, which are written at multiples of it, so that a
    run that is often stopped and resumed writes versions too. step: of the run until now.
    fetch: brings the newest weights to the agent.
    """

    pool: Path
    agent: Agent
    every: int
    step: int
    fetch: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        from torchbeast.core.actors.self_play import newest_rating

        if self.agent.spec.pickled:
            raise UsageError(
                f"selfplay reads versions of {self.agent.spec.name} from files, which cannot "
                "contain its code: put the network into a module, and give it as my_module:MyNet"
            )
        with refusing_paths("use another --selfplay"):
            self.pool.mkdir(parents=True, exist_ok=True)
        if self.step >= self.every and not any(self.pool.iterdir()):
            raise UsageError(
                f"{self.pool} does not contain a version of this run, which is at step "
                f"{self.step:,}: if the folder was moved, name it with selfplay"
            )
        self._elo = newest_rating(self.pool)  # until a game ends

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        """Writes a version if it is time for one; row: of the log, with the rating."""
        from torchbeast.core.actors.self_play import as_version, version_path

        if not math.isnan(elo := row.get("info_elo", math.nan)):
            self._elo = elo
        before, self.step = self.step, step
        if step // self.every > before // self.every:
            self.fetch()
            path = version_path(self.pool, step)
            try:
                checkpoints.save(path, as_version(self.agent, self._elo))
            except OSError as error:
                why = error.strerror or error
                said = f"no version for self-play was written to {path} ({why})"
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise RunError(said) from error
                warn(f"{said}; the run continues")
