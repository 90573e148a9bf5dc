# SPDX-License-Identifier: Apache-2.0
"""Lines that cannot be written are counted, and do not end a run."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest
from test_lost_rows import largest_file

from torchbeast.errors import RunError, exit_code_of
from torchbeast.fleets.waiting import say, warn
from torchbeast.reporting.display import Display
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.run_folder import RunFolder


def full() -> TextIO:
    """A file on a disk without room."""
    return open("/dev/full", "w")


def unread() -> TextIO:
    """A pipe to a `tee` that is gone."""
    theirs, ours = os.pipe()
    os.close(theirs)
    return os.fdopen(ours, "w")


def unread_unbuffered() -> TextIO:
    """The same under PYTHONUNBUFFERED."""
    theirs, ours = os.pipe()
    os.close(theirs)
    return unbuffered(ours)


nobody_hears = pytest.mark.parametrize("opened", [full, unread, unread_unbuffered])


@nobody_hears
def test_what_cannot_be_said_raises_nothing_and_is_in_out_log(
    opened: Callable[[], TextIO], tmp_path: Path
) -> None:
    with opened() as out, opened() as err, redirect_stdout(out), redirect_stderr(err):
        with lossy_output():
            run = RunFolder(tmp_path / "run", {})
            display = Display("Catch")
            for _ in range(3):
                say("added host b")
                display._print("steps 10 of 20")
                warn("no checkpoint was written")
                logging.getLogger("torchbeast.some_part").warning("a server died")
            run.finish(successful=True)
        assert (sys.stdout, sys.stderr) == (out, err)
    text = (tmp_path / "run" / "out.log").read_text()
    for said in ("added host b", "Warning: no checkpoint was written", "a server died"):
        assert text.count(f"] {said}\n") == 3
    assert text.count("stdout cannot be written (") == text.count("stderr cannot be written (") == 1


def buffered(path: Path) -> TextIO:
    return open(path, "w")


def unbuffered(file: Path | int) -> TextIO:
    """Returns a stream without a buffer, like the stdout of `python -u`."""
    raw: Any = io.FileIO(file, "w")
    return io.TextIOWrapper(raw, write_through=True)


@pytest.mark.parametrize(("opened", "late"), [(buffered, 1), (unbuffered, 0)])
def test_where_there_is_room_again_the_number_of_lost_lines_comes_first(
    tmp_path: Path, opened: Callable[[Path], TextIO], late: int
) -> None:
    """late: lines that waited in a buffer of Python's."""
    with opened(tmp_path / "out") as out, redirect_stdout(out), lossy_output():
        print("before", flush=True)
        with largest_file(len("before\n")):
            for _ in range(3):
                print("too much", flush=True)
        print("after", flush=True)
        print("more", flush=True)
    missing = f"({3 - late} lines could not be written here)"
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["before", *["too much"] * late, missing, "after", "more"]


@nobody_hears
def test_python_finds_nothing_at_its_exit_that_it_cannot_write(
    opened: Callable[[], TextIO],
) -> None:
    """It flushes its streams as this does, and ends with code 120 where that raises."""

    def fail() -> int:
        with lossy_output():
            print("learning", flush=True)
        raise RunError("the door is gone")

    with opened() as out, opened() as err, redirect_stdout(out), redirect_stderr(err):
        assert exit_code_of("polybeast", fail) == 1
        out.flush()
        err.flush()


def test_a_program_without_stdout_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a shell starts with `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    with lossy_output():
        say("added host b")
    assert sys.stdout is None
