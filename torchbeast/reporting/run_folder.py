# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: `{savedir}/{xpid}/` with meta.json and out.log, and `latest` beside it.

`latest` points to the run that was the last to learn from its first batch.

meta.json holds the resolved flags, dates, the git commit, which job of Slurm it was and whether the
run succeeded; never the rest of the process environment, which may hold passwords.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, BinaryIO

from torchbeast.core.base.checks import at_least, require
from torchbeast.errors import RunError, UsageError, expanded, refusing_paths
from torchbeast.reporting.output import Lock, OutLog, lock

LOGGER_NAME = "torchbeast"
CHECKPOINT = "model.tar"

# Flags with which the next command reaches others, and is reached, as this one was.
REACHING = (
    *("address", "env_servers", "listen", "insecure", "replay_service"),
    *("tls_ca", "tls_cert", "tls_key", "tls_client_ca", "token_file", "metrics_port"),
    *("working_dir", "dashboard"),
)
# Flags of one command, not of a run.
OF_ONE_COMMAND = (
    *("mode", "xpid", "savedir", "follow", "checkpoint", "num_episodes", "sampled"),
    *("random_start", "preset", "suppress_logs"),
    *REACHING,
)

_log = logging.getLogger(f"{LOGGER_NAME}.run_folder")

# How often, and after which pauses, a folder is found locked before another run has it: `is_in_use`
# holds it for less.
_ATTEMPTS = 20
_PAUSE_S = 0.01

# Others of Slurm's variables may be credentials: SLURM_JWT is one.
_OF_SLURM = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


def _new_xpid() -> str:
    return f"torchbeast-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run's name, folder and seed."""

    xpid: str = field(default_factory=_new_xpid)
    """Name of the run. The name of an earlier run resumes it with its recorded settings, which
    flags on the command line override. Default: made from the time."""
    savedir: str = "~/logs/torchbeast"
    """Parent folder: the run's files are in {savedir}/{xpid}."""
    seed: int | None = None
    """Seed of the whole run: initial weights, actions, every environment. Default: random, and
    recorded in meta.json."""

    def __post_init__(self) -> None:
        at_least(0, seed=self.seed)
        require(
            self.xpid not in ("", ".", "..", "latest") and "/" not in self.xpid,
            f"xpid must be a plain name of a folder other than 'latest', got {self.xpid!r}",
        )

    @property
    def folder(self) -> Path:
        """The run's folder, {savedir}/{xpid}."""
        with refusing_paths("give another --savedir"):
            return expanded(self.savedir).absolute() / self.xpid


class RunFolder:
    """Creates the folder of a run and records the run's metadata in it until `finish`."""

    def __init__(self, path: Path, flags: dict[str, Any], argv: list[str] | None = None) -> None:
        self.path = path
        self._meta = _new_meta(flags, sys.argv if argv is None else argv)
        with ExitStack() as opened, _beginning_in(path):
            self._is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            self._lock, held = _lock(path)
            opened.callback(self._lock.close)
            if held is Lock.OURS:  # else another process may be writing them
                _remove_unfinished(path)
            self._write_meta()
            self._handlers = _log_to(path / "out.log")
            opened.pop_all()
        if held is Lock.NONE:
            _log.warning(
                "%s cannot be locked here, because %s: make sure that no other process uses it",
                path,
                held.value,
            )

    @property
    def checkpoint(self) -> Path:
        """Path of the run's checkpoint."""
        return self.path / CHECKPOINT

    def update(self, **entries: Any) -> None:
        """Adds entries to meta.json, such as the name of the environment that the servers serve.

        On a full disk it stays as it was; the next call writes them too.
        """
        self._meta.update(entries)
        try:
            self._write_meta()
        except OSError as error:
            _warn_of(self.path / "meta.json", error, f"it lacks {', '.join(entries)}")

    def become_latest(self) -> None:
        """Points the symlink `latest` here, unless a real file or folder has that name: a run that
        has learnt something can be tested.
        """
        latest = self.path.parent / "latest"
        if latest.exists() and not latest.is_symlink():
            return
        fresh = self.path.parent / f".latest.{os.getpid()}"
        try:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self.path.name)
            os.replace(fresh, latest)
        except OSError as error:
            _warn_of(latest, error, "it does not point to this run")

    def finish(self, successful: bool) -> None:
        """Records the end of the run and releases the folder. Call it once."""
        self.update(date_end=_now(), successful=successful)
        _stop_logging_to(self._handlers)
        self._lock.close()

    def discard(self) -> None:
        """Removes a folder that is new and has nothing but the files made here; after `finish`."""
        ours = {self.path / "meta.json", self.path / "out.log"}
        if self._is_new and set(self.path.iterdir()) == ours:
            for file in ours:
                file.unlink()
            self.path.rmdir()

    def _write_meta(self) -> None:
        text = json.dumps(self._meta, indent=4, sort_keys=True, default=str)
        write_atomically(self.path / "meta.json", text.encode())


def write_atomically(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replaces the contents of `path` atomically: a reader, or a crash, sees old or new data.

    mode: permissions of the new file, less those that the process's umask takes away.
    """
    with replaced_atomically(path, mode) as file:
        file.write(data)


@contextmanager
def replaced_atomically(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends without an exception."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.unlink(missing_ok=True)  # of a killed process, or planted: with other permissions
    try:
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _beginning_in(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"nothing can be written into the run's folder {path} ({error.strerror}): make room "
            "there, or give another --savedir"
        ) from None


def _warn_of(path: Path, error: OSError, what: str) -> None:
    """Warns that a file, without which the run goes on, was not written; what: the consequence."""
    _log.warning("%s was not written (%s): %s", path, error.strerror, what)


def _lock(path: Path) -> tuple[IO[bytes], Lock]:
    """Locks the folder for this process until the file is closed, which a kill does too.

    Another process that only looks, with `is_in_use`, is waited for. Where there are no locks, the
    folder is not locked.
    """
    file = open(path / "out.log", "ab")  # noqa: SIM115
    for _ in range(_ATTEMPTS):
        if (held := lock(file)) is not Lock.OTHERS:
            return file, held
        time.sleep(_PAUSE_S)
    file.close()
    # Passes by itself where a job that is started again meets the one before, which still ends.
    raise RunError(f"another process is running in {path}: wait for it, or give another name")


def is_in_use(path: Path) -> bool:
    """Returns whether a process runs in a run's folder; where there are no locks, always False."""
    try:
        with open(path / "out.log", "rb") as file:
            return lock(file, shared=True) is Lock.OTHERS
    except OSError:  # there is no run
        return False


def _remove_unfinished(path: Path) -> None:
    """Removes files that a killed process has not finished. The caller has locked the folder."""
    for unfinished in path.glob("*.tmp"):
        if unfinished.stem.rpartition(".")[2].isdigit():  # as `replaced_atomically` names them
            unfinished.unlink(missing_ok=True)


def _log_to(path: Path) -> list[logging.Handler]:
    """Logs everything to the file, and warnings to stderr too.

    Errors are not shown here, because the program ends with them and prints them then.
    """
    file, shown = OutLog(path, encoding="utf-8", errors="backslashreplace"), warning_handler()
    file.setFormatter(
        logging.Formatter("[%(levelname)s:%(process)d %(asctime)s %(threadName)s] %(message)s")
    )
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (file, shown):
        logger.addHandler(handler)
    return [file, shown]


def _stop_logging_to(handlers: Sequence[logging.Handler]) -> None:
    """Ends what `_log_to` began; without any run in this process the logger is as at first."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()
    if not any(isinstance(handler, OutLog) for handler in logger.handlers):
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def warning_handler() -> logging.Handler:
    """Returns a logging handler that prints warnings, and only those, on stderr."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("Warning: %(message)s"))
    shown.addFilter(lambda record: record.levelno == logging.WARNING)
    return shown


def _new_meta(flags: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    return {
        "args": flags,
        "argv": argv,
        "date_start": _now(),
        "date_end": None,
        "git": _git_commit(),
        "python": sys.version.split()[0],
        "slurm": {k: v for k, v in os.environ.items() if k.startswith(_OF_SLURM)},
        "successful": False,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git_commit() -> dict[str, Any] | None:
    """Returns the git commit of the running code; None for an installed package."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    words = ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            [*words, "--dirty"], capture_output=True, check=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "is_dirty": bool(dirty)}
