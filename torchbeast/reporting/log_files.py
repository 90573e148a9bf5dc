# SPDX-License-Identifier: Apache-2.0
"""Log files of a run: logs.csv and fields.csv.

logs.csv begins with `# _tick,_time,step,...` and has one row per update. New columns are added at
the right; the last row of fields.csv is always the full list of columns. A resumed run appends to
the files and continues counting `_tick`.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from torchbeast.errors import refusing_paths
from torchbeast.reporting.logger import LoggedRun
from torchbeast.reporting.output import AppendedFile, WallTime
from torchbeast.reporting.run_folder import write_atomically


class CsvLogger:
    """Writes logs.csv and fields.csv in the run's folder."""

    def open(self, run: LoggedRun) -> LogFiles:
        """Opens the files. Raises UsageError if it cannot: plots and evaluations need them."""
        with refusing_paths("make it writable, or give another --savedir"):
            return LogFiles(run.folder, run.step)


class LogFiles:
    """Appends rows of figures to the log files. Used by one thread at a time."""

    def __init__(self, folder: Path, step: int | None = None) -> None:
        """Opens the files of a run's folder.

        step: env steps of the checkpoint that is resumed; later rows, which a killed run wrote, are
        dropped. None for a new run.
        """
        self._fields_path = folder / "fields.csv"
        self._fields = read_fields(folder)
        end_last_line(folder / "logs.csv")
        if step is not None:
            _drop_rows_after(folder / "logs.csv", step, self._fields)
        last_tick, last_time = _last(folder / "logs.csv")
        self._tick, self._time = last_tick + 1, WallTime(at_least=last_time)
        self._logs = AppendedFile(folder / "logs.csv")

    def write(self, step: int, figures: Mapping[str, float | int]) -> None:
        """Appends a row: the figures after `step` env steps. NaN becomes an empty cell.

        Raises OSError where it cannot, as on a full disk; the row is lost, and the next is tried.
        """
        row: dict[str, Any] = {"_tick": self._tick, "_time": self._time.now(), "step": step}
        row |= figures
        self._add_columns(row)
        self._logs.append(csv_line([_cell(row.get(name)) for name in self._fields]))
        self._tick += 1

    def close(self) -> None:
        """Closes the files. No method may be called afterwards."""
        self._logs.close()

    def _add_columns(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self._fields]
        if new:
            fields = self._fields + new
            with closing(AppendedFile(self._fields_path)) as file:
                file.append(csv_line(fields))
            self._fields = fields
        if self._logs.is_empty:  # also where a full disk has refused the line before
            self._logs.append(f"# {','.join(self._fields)}\n")


def csv_line(cells: Sequence[Any]) -> str:
    """Returns a row of a CSV file, with its end."""
    text = io.StringIO()
    csv.writer(text).writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None or math.isnan(value) else value


def read_fields(folder: Path) -> list[str]:
    """Returns the columns of logs.csv, or [] if there are none.

    They are the last row of fields.csv; without that file, as for a kept curve, the first line of
    logs.csv that contains `step`.
    folder: a run's folder, or a file like logs.csv.
    """
    if rows := _read_rows(folder / "fields.csv"):
        return _names(rows[-1])
    return next(
        (names for row in _read_rows(_logs_of(folder)) if "step" in (names := _names(row))), []
    )


def _names(row: list[str]) -> list[str]:
    return [row[0].removeprefix("# "), *row[1:]]


def _logs_of(folder: Path) -> Path:
    return folder / "logs.csv" if folder.is_dir() else folder


def _read_rows(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [row for row in csv.reader(file) if row]


def read_logs(folder: Path) -> Iterator[dict[str, float]]:
    """Yields the rows of logs.csv, oldest first, without the figures that are empty in a row.

    folder: a run's folder, or a file like logs.csv.
    """
    fields = read_fields(folder)
    with open(_logs_of(folder), newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if row and not row[0].startswith("#") and row != fields:
                yield {k: float(v) for k, v in zip(fields, row, strict=False) if v != ""}


def end_last_line(path: Path) -> None:
    """Removes a last row that a killed process left incomplete, so that the next one is whole."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            _cut_after_last_newline(path)


def _cut_after_last_newline(path: Path) -> None:
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _drop_rows_after(path: Path, step: int, fields: list[str]) -> None:
    if not path.exists() or "step" not in fields:
        return
    column = fields.index("step")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [x for x in lines if x.startswith("#") or int(x.split(",")[column]) <= step]
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept).encode())


def _last(path: Path) -> tuple[int, float]:
    """Returns `_tick` and `_time` of the last row that has both; -1 and 0 without any."""
    last = -1, 0.0
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                with suppress(ValueError, IndexError):  # the heading, a damaged row
                    last = int(row[0]), float(row[1])
    return last
