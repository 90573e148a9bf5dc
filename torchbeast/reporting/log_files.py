# SPDX-License-Identifier: Apache-2.0
"""The files logs.csv and fields.csv of a run, and other files with a row for each step.

logs.csv begins with `# _tick,_time,step,...` and has one row per update. New columns are added at
the right; the last row of fields.csv is always the full list of columns. A resumed run appends to
the files and continues counting `_tick`.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.reporting.output import Lock, lock
from torchbeast.reporting.run_folder import replaced_atomically

EARLIER = "logs.earlier.csv"
"""Name of the log of a run that starts again from step 0."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux: includes time in suspend


class LogFiles:
    """Appends rows of metrics to the log files. Used by one thread at a time."""

    def __init__(self, folder: Path, step: float = math.inf) -> None:
        """Opens the files of a run's folder.

        step: env steps of the checkpoint to resume. Later rows, which a killed run wrote, are
        dropped.
        """
        self._fields_path = folder / "fields.csv"
        logs, earlier = folder / "logs.csv", folder / EARLIER
        if step == 0 and _size_of(logs) > _size_of(earlier):  # the checkpoints are gone
            os.replace(logs, earlier)
        drop_after(self._fields_path, math.inf, ())  # its last line may be cut off
        self._fields = read_fields(folder)
        last_tick, last_time = drop_after(logs, step, self._fields)
        self._tick, self._time = last_tick + 1, WallTime(at_least=last_time)
        self._logs = AppendedFile(logs)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Appends a row: the metrics after `step` env steps. NaN becomes an empty cell.

        Raises OSError if it cannot, for example on a full disk. This row is then lost, but later
        ones may succeed.
        """
        own = {"_tick": self._tick, "_time": self._time.now(), "step": step}
        row = {**own, **metrics, **own}  # whatever the metrics' names are
        self._add_columns(row)
        cells = [row.get(name, math.nan) for name in self._fields]
        self._logs.append(csv_line(["" if math.isnan(cell) else cell for cell in cells]))
        self._tick += 1

    def close(self) -> None:
        """Closes the files. Do not call any method afterwards."""
        self._logs.close()

    def _add_columns(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self._fields]
        if new:
            fields = self._fields + new
            with closing(AppendedFile(self._fields_path)) as file:
                file.append(csv_line(fields))
            self._fields = fields
        if not self._logs.size:  # even if a full disk has refused the line before
            self._logs.append(f"# {','.join(self._fields)}\n")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def csv_line(cells: Sequence[Any]) -> str:
    """Returns a row of a CSV file, including the end of line."""
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()


def read_fields(folder: Path) -> list[str]:
    """Returns the columns of logs.csv, or [] if the file does not have any.

    They are the last row of fields.csv. Without that file, for example for a kept curve, they are
    the first line of logs.csv that contains `step`.
    folder: a run's folder, or a file like logs.csv.
    """
    with_steps = (row for row in _csv_rows(_logs_of(folder)) if "step" in row)
    names = [*_csv_rows(folder / "fields.csv")][-1:] or [next(with_steps, [])]
    return [name.removeprefix("# ") for name in names[0]]


def _csv_rows(path: Path) -> Iterator[list[str]]:
    """Yields the rows of a file until the first damaged one."""
    if path.exists():
        with (
            open(path, newline="", encoding="utf-8", errors="replace") as file,
            suppress(csv.Error),
        ):
            yield from filter(None, csv.reader(file))


def _logs_of(folder: Path) -> Path:
    return folder / "logs.csv" if folder.is_dir() else folder


class LogReader:
    """Reads the rows of logs.csv, and later the rows appended since. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        """folder: a run's folder, or a file like logs.csv."""
        self._folder = folder
        self._offset = 0

    def new_rows(self) -> Iterator[dict[str, float]]:
        """Yields the rows that have not been read yet, oldest first, without empty cells.

        Skips damaged rows, and a last row that a running program is still writing.
        """
        fields = read_fields(self._folder)
        with open(_logs_of(self._folder), "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if row := _row(fields, line.decode(errors="replace")):
                    yield row


def _row(fields: Sequence[str], line: str) -> dict[str, float]:
    """Returns the metrics of a row; {} for a heading or a damaged row."""
    with suppress(ValueError):
        cells = zip(fields, line.rstrip().split(","), strict=False)
        row = {k: float(v) for k, v in cells if v not in ("", "nan")}  # nan: of TorchBeast 2019
        return row if "step" in row else {}
    return {}


def read_logs(folder: Path) -> Iterator[dict[str, float]]:
    """Yields the rows of logs.csv; see LogReader."""
    return LogReader(folder).new_rows()


class RunProgress(NamedTuple):
    """The metrics of a run at one moment."""

    step: int = 0
    episodes: int = 0
    mean_return: float = math.nan  # of the last episodes; NaN: no episode has ended


class LogFollower:
    """Reads the rows that a run appends to logs.csv. Used by one thread.

    If a resumed run replaces the file, to drop rows after its checkpoint, it is read again.
    """

    def __init__(
        self, folder: Path, episodes: int, after: int = -1, is_logged: bool = True
    ) -> None:
        """folder: of the run, which need not exist yet. episodes: number in the mean. after: step
        up to which episodes do not count, because they were played with other weights. is_logged:
        whether the log's mean_return is a mean over as many episodes.
        """
        self._folder, self._file, self._after = folder, -1, after
        self._is_logged = is_logged
        self._returns: deque[float] = deque(maxlen=episodes)
        self.progress = RunProgress()

    def read(self) -> RunProgress:
        """Reads new rows; returns the newest metrics."""
        with suppress(OSError):  # the log does not exist yet
            file = (self._folder / "logs.csv").stat().st_ino
            if file != self._file:
                self._file, self._reader = file, LogReader(self._folder)
                self._returns.clear()
                self.progress = RunProgress()
            for row in self._reader.new_rows():
                self._add(row)
        if self._returns and math.isnan(self.progress.mean_return):  # or a log of TorchBeast 2019
            self.progress = self.progress._replace(mean_return=statistics.fmean(self._returns))
        return self.progress

    def _add(self, row: dict[str, float]) -> None:
        before = self.progress
        episodes = int(row.get("episodes", before.episodes))
        mean = row.get("mean_episode_return")  # of episodes in a batch
        if mean is not None and row["step"] > self._after:
            count = episodes - before.episodes if before.step > self._after else 1
            self._returns.extend([mean] * max(1, count))
        is_exact = self._after < 0 or len(self._returns) == self._returns.maxlen
        is_known = self._is_logged and is_exact
        mean_return = row.get("mean_return", math.nan) if is_known else math.nan
        self.progress = RunProgress(int(row["step"]), episodes, mean_return)


def drop_after(path: Path, step: float, fields: Sequence[str]) -> tuple[int, float]:
    """Drops an incomplete last row, and the rows after `step`, which a killed run wrote.

    fields: the file's columns. Returns `_tick` and `_time` of the last row that has both; -1 and 0
    if no row has.
    """
    if not path.exists():
        return -1, 0.0

    def begin(line: bytes) -> dict[str, float]:
        return _row(fields[:3], line.decode(errors="replace"))  # up to the step

    length, last, has_later = 0, {"_tick": -1.0, "_time": 0.0}, False
    with open(path, "rb") as file:  # which may be larger than the memory
        for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
            length, row = length + len(line), begin(line)
            if row.get("step", 0) > step:
                has_later = True
            elif row.keys() >= last.keys():
                last = row
    os.truncate(path, length)
    if has_later:
        with open(path, "rb") as file, replaced_atomically(path) as kept:
            kept.writelines(line for line in file if begin(line).get("step", 0) <= step)
    return int(last["_tick"]), last["_time"]


class AppendedFile:
    """Appends pieces of text, each completely or not at all. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and creates it if necessary."""
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, text: str) -> None:
        """Appends the text. If it cannot, raises OSError and leaves the file unchanged.

        File names that are not UTF-8 are written with escapes.
        """
        before, data = self.size, memoryview(text.encode(errors="backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def lock(self) -> bool:
        """Locks the file until it is closed; returns False if another process has locked it.

        Does nothing on a file system without locks.
        """
        return lock(self._file) is not Lock.OTHERS

    def close(self) -> None:
        """Closes the file. Do not call any method afterwards."""
        self._file.close()


class WallTime:
    """Seconds since 1970 that advance evenly even if somebody sets the system clock: the system
    time at the start, plus the elapsed time.
    """

    def __init__(self, at_least: float = -math.inf) -> None:
        """Reads the system clock, only this once.

        at_least: the last logged time, in case the system clock is behind it.
        """
        self._start = max(time.time(), at_least) - time.clock_gettime(_CLOCK)

    def now(self) -> float:
        """Returns the seconds since 1970, which never decrease."""
        return self._start + time.clock_gettime(_CLOCK)
