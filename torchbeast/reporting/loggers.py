# SPDX-License-Identifier: Apache-2.0
"""The interface of loggers, which log the metrics of a run, and the loggers: files, TensorBoard's
events, Weights & Biases, and lines on stdout; and the settings of display and logs.

    Logger  -- open(run) -->  Log  -- write(step, metrics), once per update -->  close()
    settings, reusable        one part of a run, from its start to its end
"""

from __future__ import annotations

import functools
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchbeast.core.base.checks import Settings, at_least, require, setting
from torchbeast.errors import UsageError, refusing_paths
from torchbeast.fleets.waiting import say
from torchbeast.reporting.display import line_of
from torchbeast.reporting.log_files import LogFiles, WallTime
from torchbeast.reporting.run_folder import CHECKPOINT, read_meta

_log = logging.getLogger("torchbeast.logs")

_OF_EPISODES = ("mean_episode_", "info_")  # columns that are means over the episodes of an update


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run to log."""

    folder: Path  # {savedir}/{name of the run}
    settings: Mapping[str, Any]  # by the names of flags
    step: int  # env steps of the checkpoint that it resumes; 0 for a new run


class Log(Protocol):
    """The open log of a run. Used by one thread at a time."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics after `step` env steps; NaN stands for a missing value."""

    def close(self) -> None:
        """Writes remaining data. Do not call any method afterwards."""


class Logger(Protocol):
    """Opens the log of a run."""

    def open(self, run: LoggedRun) -> Log:
        """Opens the log.

        If it raises UsageError, which says what to install or change, the run ends. If it raises
        OSError or UnicodeError, the run continues without this log.
        """


class Logs:
    """Several logs as one. If one cannot be written, e.g. on a full disk, the run continues."""

    def __init__(self, loggers: Sequence[Logger], run: LoggedRun) -> None:
        """Opens the logs in order. If one ends the run, closes the others."""
        self._logs: list[Log] = []
        with ExitStack() as opened:
            for logger in loggers:
                try:
                    log = _Lossy(logger.open(run))
                except (OSError, UnicodeError) as error:
                    text = "%s cannot log this run: %s. The run continues without it"
                    _log.warning(text, type(logger).__name__, error)
                    continue
                opened.callback(log.close)
                self._logs.append(log)
            self._opened = opened.pop_all()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes to each."""
        for log in self._logs:
            log.write(step, metrics)

    def close(self) -> None:
        """Closes each, even if one raises; the last one first."""
        self._opened.close()


class _Lossy:
    """A log that loses rows if it raises OSError, and warns about them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lost = 0  # rows since the last one that was written
        self._what = ""  # what cannot be written

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._log.write(step, metrics)
        except OSError as error:
            if not self._lost:
                self._what = str(error.filename or type(self._log).__name__)
                why = error.strerror or error
                text = "%s cannot be written (%s): rows are lost from step %s on; the run continues"
                _log.warning(text, self._what, why, f"{step:,}")
            self._lost += 1
        else:
            self._say_lost(f"it is written again at step {step:,}")

    def close(self) -> None:
        try:
            self._log.close()
        except OSError as error:
            _log.warning("%s was not closed cleanly (%s)", type(self._log).__name__, error)
        self._say_lost("the run has ended")

    def _say_lost(self, then: str) -> None:
        if self._lost:
            _log.warning("%s lost %s rows; %s", self._what, f"{self._lost:,}", then)
        self._lost = 0


class CsvLogger:
    """Writes logs.csv and fields.csv in the run's folder."""

    def open(self, run: LoggedRun) -> LogFiles:
        """Opens the files. Raises UsageError if it cannot, because plots need them."""
        with refusing_paths("make it writable, or use another savedir"):
            return LogFiles(run.folder, run.step)


_ONLY_FILES = ("mean_episode_return", "mean_episode_length")  # of a batch, and often empty
_GROUPS = (
    ("eval/", re.compile(r"(?:evaluation_(mean_(?:return|length))|(.+_mean_(?:return|length)))")),
    ("rollout/", re.compile(r"(mean_return(_.+)?|mean_length|episodes|info_.+)")),
    ("", re.compile("(.+/.+)")),
    (
        "time/",
        re.compile(
            r"time_(.+)|(steps_per_second|update_seconds|samples_per_insert"
            r"|.+_(?:lag|steps|workers|streams|queue_size|fill))"
        ),
    ),
    ("train/", re.compile("(.+)")),
)


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a row that have a value, by the names that TensorBoard and Weights &
    Biases show in groups.

        rollout/  mean return and length of the last episodes, numbers from info
        eval/     evaluations
        time/     speed, lag, queues and counters
        train/    losses, learning rates, and what callbacks and algorithms of your own add, unless
                  its name has a group

    Means over the episodes of one batch are only in logs.csv, because most batches of long episodes
    have none.
    """
    named = ((_tag(name), value) for name, value in metrics.items() if not math.isnan(value))
    return {tag: value for tag, value in named if tag}


@functools.cache
def _tag(name: str) -> str:
    """Returns the name of a column in its group; "" if it is only in files."""
    for group, names in _GROUPS if name not in _ONLY_FILES else ():
        if match := names.fullmatch(name):
            return group + next(filter(None, match.groups()))
    return ""


class TensorBoardLogger:
    """Writes TensorBoard events into the run's folder, if TensorBoard is installed."""

    def open(self, run: LoggedRun) -> Log:
        """Opens the events of a run, and hides events after the checkpoint that it resumes."""
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard import summary as summaries
        except ImportError:
            _say_missing()
            return Logs((), run)
        writer: Any = SummaryWriter(str(run.folder), purge_step=run.step + 1)
        settings = {k: v if isinstance(v, int | float) else str(v) for k, v in run.settings.items()}
        # Not writer.add_hparams, which would write a second run.
        hparams: Any = summaries.hparams
        for summary in hparams(settings, {"rollout/mean_return": math.nan}):
            writer.file_writer.add_summary(summary)
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        table = "\n".join(["| flag | value |", "| --- | --- |", *rows])
        writer.add_text("settings", table, run.step)
        return TensorBoardLog(writer, lambda: SummaryWriter(str(run.folder)))


@functools.cache
def _say_missing() -> None:
    say(
        "TensorBoard is not installed, so this run writes no events: pip install "
        "'torchbeast[tensorboard]', or set disable_tensorboard."
    )


_FIRST_PAUSE_S = 10.0


class TensorBoardLog:
    """The events of a run. Used by one thread at a time."""

    def __init__(self, writer: Any, make: Callable[[], Any]) -> None:
        """writer: a SummaryWriter. make: makes another one, with a file of its own."""
        self._writer, self._make, self._time = writer, make, WallTime()
        self._pause, self._next = _FIRST_PAUSE_S, 0.0  # between new writers; when one may be made

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a scalar for each metric except NaN; see `grouped`.

        Raises OSError if the writer's thread has failed, which then does not write any more. Later
        rows go to another writer.
        """
        now = self._time.now()
        try:
            for name, value in grouped(metrics).items():
                self._writer.add_scalar(name, value, step, walltime=now)
        except OSError:
            if time.monotonic() >= self._next:
                self._next, self._pause = time.monotonic() + self._pause, 2 * self._pause
                with suppress(RuntimeError):  # no thread may start: the next try comes later
                    self._writer = self._make()
            raise

    def close(self) -> None:
        """Writes the last events."""
        self._writer.close()


class StdoutLogger:
    """Prints rows of metrics on stdout at intervals, made of the updates between like those of
    ThinnedLogger.
    """

    def __init__(self, names: Collection[str] | None = None, every_seconds: float = 10.0) -> None:
        """Prepares printing.

        Args:
            names: Names of the metrics to print. None: all.
            every_seconds: Seconds between two rows, at least.
        """
        at_least(0, every_seconds=every_seconds)
        self._names, self._every = names, every_seconds

    def open(self, run: LoggedRun) -> Log:
        """Starts with the next row."""
        return ThinnedLog(_Lines(self._names), self._every)


class _Lines:
    """Prints rows on stdout, without values that are NaN."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {
            name: f"{value:.4g}"
            for name, value in metrics.items()
            if not math.isnan(value) and (self._names is None or name in self._names)
        }
        print(line_of({"step": f"{step:,}"} | shown), flush=True)

    def close(self) -> None:
        pass


class ThinnedLogger:
    """Gives loggers a row at intervals. It has the sums of the seconds of its updates, the means of
    their episodes, and the newest values of other metrics.
    """

    def __init__(self, loggers: Sequence[Logger], every_seconds: float) -> None:
        """every_seconds: seconds between two rows, at least."""
        self._loggers, self._every = loggers, every_seconds

    def open(self, run: LoggedRun) -> ThinnedLog:
        """Opens the logs. Their first row is the next one."""
        return ThinnedLog(Logs(self._loggers, run), self._every)


class ThinnedLog:
    """The logs of a run. Used by one thread at a time."""

    def __init__(self, log: Log, every_seconds: float) -> None:
        """See ThinnedLogger."""
        self._log, self._every = log, every_seconds
        self._written = -math.inf  # time of the last row
        self._step = 0
        self._episodes = 0.0  # in the run, after the last update
        self._row: dict[str, float] = {}  # of the updates since the last row
        self._counts: dict[str, float] = {}  # episodes in each mean of the row

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds an update to the row, and writes the row if it is time."""
        now = metrics.get("episodes", 0.0)
        ended, self._step, self._episodes = now - self._episodes, step, now
        for name, value in metrics.items():
            before = self._row.setdefault(name, math.nan)
            if math.isnan(value):
                continue
            self._counts[name] = self._counts.get(name, 0.0) + ended
            if not math.isnan(before):
                if name.startswith("time_"):
                    value += before
                elif name.startswith(_OF_EPISODES):
                    value = before + (value - before) * ended / max(1.0, self._counts[name])
            self._row[name] = value
        if time.monotonic() - self._written >= self._every:
            self._write()

    def close(self) -> None:
        """Writes the row of the last updates."""
        if self._row:
            self._write()
        self._log.close()

    def _write(self) -> None:
        row, self._row, self._counts = self._row, {}, {}
        self._log.write(self._step, row)
        self._written = time.monotonic()


class WandbLogger:
    """Logs a run to a project of Weights & Biases, under the run's name.

    The environment variables of wandb work as usual: WANDB_MODE=offline only writes files, into
    `wandb/` of the run's folder, which `wandb sync` can send later.
    """

    def __init__(self, project: str, *, upload: bool = False, **init: Any) -> None:
        """Prepares logging.

        Args:
            project: The project's name.
            upload: Whether to add the checkpoints to the run as artifacts when it ends.
            **init: Further arguments of `wandb.init`, such as entity or tags.
        """
        self._project, self._uploads, self._init = project, upload, init

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
            "name": run.folder.name,
            "id": _id_in(run.folder / "wandb"),
            "dir": str(run.folder),
            "config": dict(run.settings),
            "allow_val_change": True,  # a resumed run may have other settings
            "resume": "allow",
            "reinit": "create_new",  # in addition to a run of a notebook
            "settings": wandb.Settings(console="off"),  # the display is not a log
        }
        try:
            return WandbLog(
                wandb.init(**of_this_run | self._init), run.folder if self._uploads else None
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise UsageError(
                f"Weights & Biases: {error}. Call `wandb login`, or set WANDB_MODE=offline"
            ) from error
        except wandb.Error as error:  # for example of the network
            raise OSError(str(error)) from error


class WandbLog:
    """The log of a run. Used by one thread at a time."""

    def __init__(self, run: Any, uploaded: Path | None = None) -> None:
        """run: a wandb.Run. Its own step counts calls, so that a resumed run can log steps after
        the checkpoint again. Charts use our step as x axis. uploaded: the folder whose checkpoints
        become artifacts.
        """
        self._run, self._uploaded = run, uploaded
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs each metric except NaN; see `grouped`."""
        with _as_os_error():
            self._run.log({"step": step, **grouped(metrics)})

    def add_video(self, step: int, path: Path) -> None:
        """Logs an mp4 file as the video of an evaluation."""
        import wandb

        with _as_os_error():
            self._run.log({"step": step, "eval/video": wandb.Video(str(path), format="mp4")})

    def close(self) -> None:
        """Uploads the newest and the best checkpoint, and waits until everything has been sent."""
        folder = self._uploaded
        paths = () if folder is None else (folder / CHECKPOINT, *folder.glob("*_best.tar"))
        with _as_os_error():
            try:
                for path in filter(Path.exists, paths):
                    name = re.sub(r"[^\w.-]", "-", f"{path.parent.name}-{path.stem}")
                    # The service takes names of at most 128 characters.
                    self._run.log_artifact(str(path), name=name[-128:], type="model")
            finally:
                self._run.finish()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Converts what the service refuses to an OSError, which ends no run."""
    import wandb

    try:
        yield
    except (wandb.Error, ValueError) as error:
        raise OSError(str(error)) from error


def upload_video(folder: Path, step: int, path: Path) -> None:
    """Adds a video to a run in Weights & Biases, if the run was trained with --wandb_upload."""
    settings = read_meta(folder).get("args", {})
    if settings.get("wandb_upload"):
        run = LoggedRun(folder=folder, settings=settings, step=step)
        log = WandbLogger(settings["wandb_project"]).open(run)
        log.add_video(step, path)
        log.close()


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
class DisplayConfig(Settings):
    """The display in the terminal."""

    episodes_for_avg: int = setting(100, bounds=(at_least, 1))
    """Number of recent episodes over which the mean return and length are shown."""
    suppress_logs: bool = setting(False, "command")
    """Print only messages of the start, warnings and the summary to the terminal, not the progress.
    The run's files are written as usual."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(Settings):
    """The logs of the run."""

    log_interval: float = setting(0.0, "incidental", bounds=(at_least, 0))
    """Minimum number of seconds between rows of the logs. A row covers all updates since the
    previous row. 0 writes a row of logs.csv for each update; TensorBoard and Weights & Biases get
    at most one a second."""
    disable_tensorboard: bool = setting(False, "incidental")
    """Do not write TensorBoard event files, even if TensorBoard is installed."""
    wandb_project: str | None = setting(None, "incidental")
    """Also log to this Weights & Biases project (pip install 'torchbeast[wandb]'). With the
    environment variable WANDB_MODE=offline, only local files are written. Default: off."""
    wandb_upload: bool = setting(False, "incidental")
    """Also upload the newest and the best checkpoint as artifacts when the run ends, and the videos
    of --mode test_render."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.wandb_project is not None or not self.wandb_upload,
            "wandb_upload needs a project: set wandb_project too",
        )

    def loggers(self) -> tuple[Logger, ...]:
        """Returns the loggers of the run.

        TensorBoard takes as long for a row as a small network for an update, and shows 1,000 of
        them.
        """
        table = ThinnedLogger([CsvLogger()], self.log_interval)
        charts: list[Logger] = [] if self.disable_tensorboard else [TensorBoardLogger()]
        if self.wandb_project is not None:
            charts.append(WandbLogger(self.wandb_project, upload=self.wandb_upload))
        return (table, ThinnedLogger(charts, max(1.0, self.log_interval)))
