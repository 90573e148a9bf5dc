# SPDX-License-Identifier: Apache-2.0
"""Output and logs of a run. A failure to write them never ends the run.

    stdout and stderr   LossyStream: loses lines if the disk is full or the reader is gone
    out.log             OutLog, over a LossyStream
    other logs          AppendedFile: on a full disk it loses complete rows, never parts

When writing works again, the number of lost lines is written first. A file can be locked against
other processes. WallTime provides the times in logs.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any, TextIO, cast

from torchbeast.errors import forget_unwritten

_log = logging.getLogger("torchbeast.output")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class LossyStream:
    """Writes to a text stream. While that fails, it loses lines and counts them.

    Any thread may write. It does not use a lock, so that signal handlers can print. If several
    threads lose lines at the same moment, the count may be wrong by one.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._is_failing = False
        self._begins = True  # whether the next text starts a line
        self._lost = 0  # number of lost lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or loses it. If the start of a line is lost, so is its end."""
        begins, self._begins = self._begins, text.endswith("\n")
        if not self._is_failing or (begins and self._is_mended()):
            try:
                return self._stream.write(text)
            except OSError as error:
                self._fail(error)
        self._lost += text.count("\n")
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, which keeps text that it could not write for the next attempt."""
        if self._is_failing:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Closes the stream, and drops text that it could not write."""
        with suppress(OSError):
            self._stream.close()

    def _fail(self, error: OSError) -> None:
        self._is_failing = True  # first, because the warning may come here too
        _log.warning(
            "%s cannot be written (%s): output there is lost until it can; the run continues",
            self._name,
            error.strerror,
        )

    def _is_mended(self) -> bool:
        """Tries to write the number of lost lines; returns whether the stream works again."""
        try:
            self._stream.flush()  # first, so that its buffer does not grow while this fails
            if self._lost:
                self._stream.write(f"({self._lost} lines could not be written here)\n")
                self._stream.flush()
        except OSError:
            return False
        self._is_failing, self._lost = False, 0
        return True


@contextmanager
def lossy_output() -> Iterator[None]:
    """Lets stdout and stderr lose what they cannot write, instead of raising OSError.

    This is for runs, which are worth more than their output. A program whose purpose is its output
    should rather fail.
    """
    with ExitStack() as kept:
        for stream, name, redirect in (
            (sys.stdout, "stdout", redirect_stdout),
            (sys.stderr, "stderr", redirect_stderr),
        ):
            if stream is not None:  # None if the program was started without it
                kept.callback(forget_unwritten, stream)
                kept.enter_context(redirect(cast(TextIO, LossyStream(stream, name))))
        yield


class Lock(Enum):
    """The result of trying to lock a file."""

    OURS = "ours"
    OTHERS = "another process has it"
    NONE = "its file system has no locks"  # Lustre with noflock, NFS without lock daemon


def lock(file: IO[bytes], shared: bool = False) -> Lock:
    """Tries to lock an open file; shared: together with others that do the same."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.OTHERS
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.NONE
        raise
    return Lock.OURS


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


class OutLog(logging.FileHandler):
    """Appends every record to a file, or loses it."""

    def _open(self) -> Any:
        return LossyStream(super()._open(), self.baseFilename)


class WallTime:
    """Seconds since 1970 that advance evenly even if somebody sets the system clock: the system
    time at the start, plus the elapsed time.
    """

    def __init__(self, at_least: float = -math.inf) -> None:
        """Reads the system clock, only this once.

        at_least: the last logged time, in case the system clock is behind it.
        """
        self._start = max(time.time(), at_least) - _seconds_elapsed()

    def now(self) -> float:
        """Returns the seconds since 1970, which never decrease."""
        return self._start + _seconds_elapsed()


def _seconds_elapsed() -> float:
    """Returns seconds of a monotonic clock, which on Linux includes time in suspend."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
