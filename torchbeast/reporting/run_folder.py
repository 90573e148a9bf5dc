# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: `{savedir}/{xpid}/` with meta.json and out.log, and the link `latest`; and
its session, from signal handlers to the error to report.

`latest`, next to the folder, points to the run that most recently completed its first update: to
its meta.json, because TensorBoard follows links to folders and would show the run twice. `run_path`
resolves it.

A run has a part for each command that has trained it. meta.json describes the newest part: its
resolved flags, command line, dates, git commit and Slurm job, whether it succeeded, the `step` at
which it began, and which flags had `changed` there. `earlier_parts` is a list of the parts before
it. The file never contains other environment variables, which may include passwords.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from torchbeast import errors, zoo
from torchbeast.core.base.checks import Settings, at_least, require, setting
from torchbeast.fleets.supervisor import Failure, Supervisor
from torchbeast.fleets.system import keeping_reserve, reserved_files
from torchbeast.fleets.waiting import say
from torchbeast.reporting.output import Lock, OutLog, lock, lossy_output

LOGGER_NAME = "torchbeast"
CHECKPOINT = "model.tar"
META = "meta.json"

_log = logging.getLogger(f"{LOGGER_NAME}.run_folder")

# How often, and after which pauses, a folder must be found locked to count as in use by a run:
# `is_in_use` locks it for a shorter time.
_ATTEMPTS = 20
_PAUSE_S = 0.01

_LISTED = 5  # runs in a message
_SHOWING: list[logging.Handler] = []  # warnings of the open runs; the first one prints them

# Other variables of Slurm may be credentials, for example SLURM_JWT.
_OF_SLURM = ("SLURM_JOB_", "SLURM_ARRAY_", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT")


def new_name(prefix: str) -> str:
    """Returns a name that no other process or thread gets, not even in the same second, or as
    process 1 of another container.
    """
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def check_name_of_folder(**values: str | None) -> None:
    """Raises ValueError unless a setting is a name that the folder of a run may have, or None."""
    for name, value in values.items():
        require(
            value is None or (value not in ("", ".", "..", "latest") and "/" not in value),
            f"{name} must be a plain name of a folder other than 'latest', got {value!r}",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The run's name, folder and seed."""

    xpid: str = setting(lambda: new_name("torchbeast"), "command", bounds=(check_name_of_folder,))
    """Name of the run. If a run with this name exists, it is resumed with its recorded settings;
    flags on the command line override them. zoo:PRESET is a trained agent, for --mode test.
    Default: a timestamp and a random number."""
    savedir: str = setting("~/logs/torchbeast", "command")
    """Parent folder: the run's files are in {savedir}/{xpid}."""
    seed: int | None = setting(None, "incidental", bounds=(at_least, 0))
    """Seed of the run: initial weights, actions and environments. Default: random, recorded in
    meta.json."""
    pause_at: int | None = setting(None, "command", bounds=(at_least, 1))
    """Save a checkpoint and exit at this environment step, like Ctrl-C. Schedules still end at
    --total_steps. The same command without this flag continues the run."""
    restart_schedules: bool = setting(True, "command")
    """Whether a run that you resume with a different learning rate, or another setting that has a
    schedule, starts the schedule at the current step. If not, the new value scales the present
    schedule, which began with the run or at an earlier change."""

    @property
    def folder(self) -> Path:
        """The run's folder, {savedir}/{xpid}."""
        with errors.refusing_paths("use another savedir"):
            return errors.expanded(self.savedir).absolute() / self.xpid


class RunFolder:
    """Creates the folder of a run, and records a part of the run in it from `begin` to `finish`.

    A new run is recorded immediately. An existing record does not change before `begin`.
    """

    def __init__(self, path: Path, flags: dict[str, Any], argv: list[str] | None = None) -> None:
        self.path, self.checkpoint = path, path / CHECKPOINT
        self._claim, self._number = path / "claim", secrets.token_hex(8)
        self._meta = _new_meta(flags, sys.argv if argv is None else argv)
        what = f"the run's folder {path}"
        with ExitStack() as opened, errors.refusing_paths("use another savedir", what):
            self._is_new = _make(path)
            opened.enter_context(keeping_reserve())
            file, held = _lock(path)
            opened.callback(file.close)
            if held is Lock.OURS:  # otherwise another process may be writing them
                _remove_unfinished(path)
                self._claim.unlink(missing_ok=True)
            self._is_locked = held is Lock.OURS
            self._earlier = _earlier_meta(path)
            self._is_recorded = not self._earlier
            if self._is_recorded:
                self._write_meta()
            opened.enter_context(_logged_to(path / "out.log"))
            self._opened = opened.pop_all()
        if held is Lock.NONE:
            _log.warning(
                f"{path} cannot be locked here, because {held.value}: once this run trains, a run "
                "that still uses the folder ends at its next checkpoint"
            )

    def begin(
        self, settings: Mapping[str, Any], step: int, changed: Mapping[str, Any] | None = None
    ) -> None:
        """Records that a part of the run begins; call it once there is something to train.

        Earlier parts whose training is lost, because they began at this step or after it, are
        dropped.

        Args:
            settings: Every setting by the name of its flag.
            step: Environment steps of the run until now.
            changed: Settings that differ from the previous part: [before, now] by name.
        """
        if not self._is_locked:
            write_atomically(self._claim, self._number.encode())
        parts = [*self._earlier.pop("earlier_parts", ()), self._earlier]
        self._meta["earlier_parts"] = [
            {name: value for name, value in part.items() if name != "args"}
            for part in parts
            if part and part.get("step", 0) < step
        ]
        self._is_recorded = True
        self._record(args=settings, step=step, changed=changed or {})

    def _record(self, **entries: Any) -> None:
        """Adds entries to meta.json.

        On a full disk the file stays unchanged, and the next call writes these entries too.
        """
        self._meta.update(entries)
        try:
            self._write_meta()
        except OSError as error:
            _warn_of(self.path / META, error, f"it lacks {', '.join(entries)}")

    def check_is_ours(self) -> None:
        """Raises RunError if another process has taken the folder over, on a file system without
        locks.
        """
        if not self._is_ours():
            raise errors.RunError(
                f"another process has started in {self.path}, which cannot be locked, so this one "
                "stops and leaves the checkpoints to the other: use a different name for each run"
            )

    def _is_ours(self) -> bool:
        return not self._claim.exists() or self._claim.read_text() == self._number

    def become_latest(self) -> None:
        """Points the symlink `latest` to this run, unless a real file or folder has that name.

        Called after the first update, because a run can be tested from then on.
        """
        latest = self.path.parent / "latest"
        if latest.exists() and not latest.is_symlink():
            return
        fresh = self.path.parent / f".latest.{secrets.randbits(32)}"
        try:
            fresh.symlink_to(Path(self.path.name, META))
            os.replace(fresh, latest)
        except OSError as error:
            _warn_of(latest, error, "it does not point to this run")

    def finish(self, successful: bool, is_complete: bool = True) -> None:
        """Records the end of the part, if it has begun, and releases the folder. Call it once.

        is_complete: whether a part that has not begun had nothing left to do.
        """
        if self._is_recorded and self._is_ours():
            self._record(date_end=_now(), successful=successful)
        elif successful and is_complete and not self._earlier.get("successful", True):
            self._meta = self._earlier  # killed after its last checkpoint, but complete
            self._record(successful=True)
        self._opened.close()

    def discard(self) -> None:
        """Removes a new folder that only contains the files made here; call it after `finish`."""
        found = {*self.path.iterdir()}
        if self._is_new and found <= {self.path / META, self.path / "out.log", self._claim}:
            for file in found:
                file.unlink()
            self.path.rmdir()

    def _write_meta(self) -> None:
        text = json.dumps(self._meta, indent=4, sort_keys=True, default=str)
        write_atomically(self.path / META, text.encode())


def run_path(path: str | Path) -> Path:
    """Returns the path of a run or a file with ~ expanded; for the link `latest`, the run's folder,
    and for latest/FILE its file; for zoo:NAME the checkpoint of a trained agent. A name that does
    not exist here is a run in the usual folder.

    Raises OSError if the home directory is unknown, and UsageError for an unknown agent, or another
    file of one.
    """
    found = errors.expanded(path)
    for part in found.parts[-2:]:  # the name itself, or as a run with a checkpoint
        if part.startswith(zoo.PREFIX):
            if found.name not in (part, CHECKPOINT):
                raise errors.UsageError(f"{part} has only one checkpoint: remove {found.name}")
            return zoo.agent_path(part.removeprefix(zoo.PREFIX))
    if len(found.parts) == 1 and found.suffix != ".tar" and not found.exists():
        found = errors.expanded(RunConfig.savedir) / found
    if found.parent.name == "latest":
        return run_path(found.parent) / found.name
    return found.resolve().parent if found.name == "latest" and found.is_file() else found


def runs_next_to(folder: Path) -> str:
    """Returns the end of a message about a run that does not exist: the newest runs next to it."""
    metas = [m for m in folder.parent.glob(f"*/{META}") if not m.parent.is_symlink()]  # latest
    newest = sorted(metas, key=lambda meta: meta.stat().st_mtime, reverse=True)[:_LISTED]
    if not newest:
        return f"there are no runs in {folder.parent}"
    return f"the newest runs in {folder.parent} are {', '.join(m.parent.name for m in newest)}"


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns what meta.json says about a run; {} if there is none that can be read."""
    try:
        return _earlier_meta(folder)
    except OSError:
        return {}


def _earlier_meta(folder: Path) -> dict[str, Any]:
    """Returns the same; but raises OSError for a file that cannot be read at present, which must
    not be replaced.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _make(path: Path) -> bool:
    """Makes a folder; returns False if it exists. Of several processes only one gets True."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        path.mkdir(exist_ok=True)  # refuses a file
        return False
    return True


def write_atomically(path: Path, data: bytes | memoryview, mode: int = 0o666) -> None:
    """Replaces the contents of `path` atomically: readers see old or new data, even after a crash.

    mode: permissions of the new file, reduced by the process's umask.
    """
    with replaced_atomically(path, mode) as file:
        file.write(data)


@contextmanager
def replaced_atomically(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` if the block ends without an exception."""
    unfinished = path.with_name(f"{path.name}.{secrets.randbits(32)}.tmp")
    try:
        with (
            reserved_files(),
            open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _warn_of(path: Path, error: OSError, what: str) -> None:
    """Warns that an optional file was not written; what: the consequence."""
    _log.warning("%s was not written (%s): %s", path, error.strerror, what)


def _lock(path: Path) -> tuple[IO[bytes], Lock]:
    """Locks the folder for this process until the file is closed, or the process is killed.

    Waits for processes that only look at the folder with `is_in_use`. On a file system without
    locks, the folder is not locked.
    """
    file = open(path / "out.log", "ab")  # noqa: SIM115
    for _ in range(_ATTEMPTS):
        if (held := lock(file)) is not Lock.OTHERS:
            return file, held
        time.sleep(_PAUSE_S)
    file.close()
    # A restarted job may find the previous one still ending; then waiting suffices.
    raise errors.RunError(f"another process is running in {path}: wait for it, or use another name")


def is_in_use(path: Path) -> bool:
    """Returns whether a process uses a run's folder; always False without locks."""
    try:
        with open(path / "out.log", "rb") as file:
            return lock(file, shared=True) is Lock.OTHERS
    except OSError:  # the run does not exist
        return False


def _remove_unfinished(path: Path) -> None:
    """Removes unfinished files of a killed process. The caller must have locked the folder."""
    for unfinished in (*path.glob("*.tmp"), *path.glob("checkpoints/*.tmp")):
        if unfinished.stem.rpartition(".")[2].isdigit():  # a name of `replaced_atomically`
            unfinished.unlink(missing_ok=True)


@contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Logs everything to the file, and warnings to stderr too.

    Errors are not shown here, because the program prints them when it ends. After the last run of
    this process, the logger has its earlier settings.
    """
    file, shown = OutLog(path, encoding="utf-8", errors="backslashreplace"), warning_handler()
    file.setFormatter(
        logging.Formatter("[%(levelname)s:%(process)d %(asctime)s %(threadName)s] %(message)s")
    )
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    shown.addFilter(lambda record: _SHOWING[:1] == [shown])
    _SHOWING.append(shown)
    for handler in (file, shown):
        logger.addHandler(handler)
    yield
    _SHOWING.remove(shown)
    for handler in (file, shown):
        logger.removeHandler(handler)
        handler.close()
    if not any(isinstance(handler, OutLog) for handler in logger.handlers):
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


class _Readable(logging.Formatter):
    """Formats records without what a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return errors.readable(super().format(record))


def warning_handler() -> logging.Handler:
    """Returns a logging handler that prints warnings, and only those, on stderr."""
    shown = logging.StreamHandler()
    shown.setFormatter(_Readable("Warning: %(message)s"))
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
        "step": 0,
        "changed": {},
        "earlier_parts": [],
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


class Session(NamedTuple):
    """The supervisor and the folder of a run."""

    supervisor: Supervisor
    folder: RunFolder


@contextmanager
def session(path: Path, settings: dict[str, Any], is_kept: bool = True) -> Iterator[Session]:
    """Opens a run and ends it; raises the run's first failure as UsageError or RunError.

    An exception of the body is a failure of the run, just like an exception of one of its threads.
    Failing to print is not.

    path: the run's folder. If it is new, and the run ends with a UsageError before it has written
        anything but its metadata, the folder is removed again.
    settings: every flag by its name, for meta.json.
    is_kept: whether the folder stays after the run, so that errors can point to its log.
    """
    supervisor = Supervisor()
    with lossy_output(), supervisor.signals():
        folder = RunFolder(path, settings)
        try:
            yield Session(supervisor, folder)
        except (Exception, SystemExit) as error:  # users' code may call sys.exit
            supervisor.fail("", error)
        finally:
            supervisor.stop("the program ended")
            if supervisor.interrupted:
                say(f"Stopped by {supervisor.reason}.")
            failure = supervisor.failure
            folder.finish(failure is None, is_complete=not supervisor.interrupted)
            if failure is not None and isinstance(failure.error, errors.UsageError):
                folder.discard()
    raise_failure(supervisor.failure, folder if is_kept else None)


def raise_failure(failure: Failure | None, folder: RunFolder | None = None) -> None:
    """Raises a failure as UsageError or RunError; does nothing for None."""
    if failure is None:
        return
    if isinstance(failure.error, errors.UsageError):
        raise failure.error
    # if the user's network or algorithm raised it, its lines of the traceback
    said = (
        ""
        if isinstance(failure.error, errors.RunError)
        else errors.what_users_code_raised(failure.error)
    )
    if not said:
        said = errors.without_our_frames(str(failure))
    elif failure.origin:
        said = f"{failure.origin}: {said}"
    where = f"\nSee {folder.path / 'out.log'} for details" if folder else ""
    raise errors.RunError(f"{said}{where}") from failure.error
