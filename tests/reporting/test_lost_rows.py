# SPDX-License-Identifier: Apache-2.0
"""A full disk loses rows and messages as a whole, which is said, and never ends a run.

The limit of a process on the size of its files takes the place of the disk: the system writes a
part of what does not fit, as a disk does, and refuses the rest.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchbeast.errors import UsageError
from torchbeast.reporting import CsvLogger, log_files, loggers
from torchbeast.reporting.log_files import AppendedFile, LogFiles, read_fields, read_logs
from torchbeast.reporting.loggers import LoggedRun, Logs
from torchbeast.reporting.run_folder import RunFolder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_piece_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "a")
    assert file.size == 0
    file.append("first\n")
    with largest_file(10), pytest.raises(OSError, match=f"File too large: '{tmp_path / 'a'}'"):
        file.append("second\n")
    assert (tmp_path / "a").read_text() == "first\n" and file.size == 6
    file.append("third\n")
    file.close()
    assert (tmp_path / "a").read_text() == "first\nthird\n"


def rows(folder: Path) -> list[tuple[float, float]]:
    return [(row["step"], row["loss"]) for row in read_logs(folder)]


def test_lost_rows_leave_a_log_of_whole_rows_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run", {})
    logs = Logs([CsvLogger()], LoggedRun(folder=run.path, settings={}, step=0))
    logs.write(10, {"loss": 0.5})
    path = run.path / "logs.csv"
    with largest_file(path.stat().st_size + 5):
        for step in (20, 30, 40):
            logs.write(step, {"loss": 0.25})
    logs.write(50, {"loss": 0.125})
    logs.close()
    run.finish(successful=True)
    assert rows(run.path) == [(10, 0.5), (50, 0.125)]
    told = capsys.readouterr().err.splitlines()
    # Each once, and none in other words: what another test did not finish shows warnings too.
    shown = [line for line in told if str(path) in line and line.startswith("Warning: ")]
    first, second = dict.fromkeys(shown)
    assert first == (
        f"Warning: {path} cannot be written (File too large): "
        "rows are lost from step 20 on; the run continues"
    )
    assert second == f"Warning: {path} lost 3 rows; it is written again at step 50"


def test_rows_that_are_lost_at_the_end_are_said_when_the_log_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def open(self, run: LoggedRun) -> Full:
            return self

        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    monkeypatch.setattr(loggers._log, "warning", lambda text, *parts: said.append(text % parts))
    logs = Logs([Full()], LoggedRun(folder=tmp_path, settings={}, step=0))
    logs.write(10, {})
    logs.write(20, {})
    logs.close()
    assert said[-1] == "Full lost 2 rows; the run has ended"
    assert len(said) == 3 and "was not closed cleanly" in said[1]


def test_a_new_column_that_does_not_fit_is_tried_again_with_the_next_row(tmp_path: Path) -> None:
    """The rows would not be those of the columns in fields.csv."""
    files = LogFiles(tmp_path)
    files.write(10, {"loss": 0.5})
    columns = read_fields(tmp_path)
    with largest_file((tmp_path / "fields.csv").stat().st_size + 5):
        with pytest.raises(OSError, match="fields.csv"):
            files.write(20, {"loss": 0.25, "entropy": 1.0})
    assert read_fields(tmp_path) == columns
    files.write(30, {"loss": 0.125, "entropy": 2.0})
    files.close()
    assert read_fields(tmp_path) == [*columns, "entropy"]
    assert rows(tmp_path) == [(10, 0.5), (30, 0.125)]
    assert list(read_logs(tmp_path))[-1]["entropy"] == 2.0


def test_the_first_line_of_the_log_that_does_not_fit_is_tried_again(tmp_path: Path) -> None:
    """It has two bytes more than the same line of fields.csv."""
    log = LogFiles(tmp_path)
    with largest_file(len("_tick,_time,step,loss\r\n")), pytest.raises(OSError):
        log.write(10, {"loss": 0.5})
    log.write(20, {"loss": 0.25})
    log.close()
    assert (tmp_path / "logs.csv").read_text().startswith("# _tick,_time,step,loss\n")
    assert rows(tmp_path) == [(20, 0.25)]


def test_a_full_disk_at_the_start_of_a_resumed_run_leaves_its_log(tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    for step in range(10, 100, 10):
        files.write(step, {"loss": 0.5})
    files.close()
    before = (tmp_path / "logs.csv").read_bytes()
    with largest_file(50), pytest.raises(OSError):
        log_files.LogFiles(tmp_path, step=50)
    assert (tmp_path / "logs.csv").read_bytes() == before


def test_lost_messages_of_out_log_are_counted_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = RunFolder(tmp_path / "run", {}), logging.getLogger("torchbeast.some_part")
    log.info("before")
    path = run.path / "out.log"
    with largest_file(path.stat().st_size + 3):
        log.info("late")
        log.info("lost")
    log.info("after")
    run.finish(successful=True)
    before, late, count, after = path.read_text().splitlines()
    assert before.endswith("before") and after.endswith("after")
    assert late.endswith("late"), "it waited in a buffer of Python's"
    assert count == "(2 lines could not be written here)", "the warning is one of them"
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        f"Warning: {path} cannot be written (File too large): output to it is lost "
        "meanwhile; the run continues"
    )


def test_meta_json_stays_as_it_was_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run", {})
    before = (run.path / "meta.json").read_bytes()
    with largest_file(20):
        run.begin({"env": "Catch"}, 0)
    assert (run.path / "meta.json").read_bytes() == before
    assert (
        "meta.json was not written (File too large): it lacks args, step" in capsys.readouterr().err
    )
    run.finish(successful=True)
    assert b'"env": "Catch"' in (run.path / "meta.json").read_bytes(), "written with the next"


def test_a_run_that_cannot_write_at_its_start_is_refused(tmp_path: Path) -> None:
    with largest_file(0):
        with pytest.raises(
            UsageError,
            match=r"the run's folder .*run cannot be used \(File too large\): use another",
        ):
            RunFolder(tmp_path / "run", {})
    RunFolder(tmp_path / "run", {}).finish(successful=True)  # the folder is not locked
