# SPDX-License-Identifier: Apache-2.0
"""Output and logs of a run. No failure to write them ends the run.

    stdout and stderr   LossyStream: a full disk or a dead reader behind them loses lines
    out.log             OutLog, over a LossyStream
    other logs          AppendedFile: a full disk loses a row as a whole and never cuts it

Where there is room again, the number of lost lines is written first. A file can be locked against
other processes. WallTime dates what is logged.
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
    """Writes to a stream of text. Where this fails, lines are lost and counted until it can again.

    Any thread may write. There is no lock, so that a handler of signals may print; threads that
    lose lines at the same moment may count one of them twice, or not at all.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._is_failing = False
        self._begins = True  # whether the next text begins a line
        self._lost = 0  # lines, since it fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or loses it; of a line whose beginning is lost, the end is lost too."""
        begins, self._begins = self._begins, text.endswith("\n")
        if not self._is_failing or (begins and self._is_mended()):
            try:
                return self._stream.write(text)
            except OSError as error:
                self._fail(error)
        self._lost += text.count("\n")
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; what it could not write stays with it, to be tried again."""
        if self._is_failing:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Closes the stream, and drops what it could not write."""
        with suppress(OSError):
            self._stream.close()

    def _fail(self, error: OSError) -> None:
        self._is_failing = True  # first: the warning may come here too
        _log.warning(
            "%s cannot be written (%s): output there is lost until it can; the run continues",
            self._name,
            error.strerror,
        )

    def _is_mended(self) -> bool:
        """Tries to say how many lines are lost; returns whether the stream takes text again."""
        try:
            self._stream.flush()  # first: while this fails, nothing more piles up in its buffer
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

    For the time of a run, which is worth more than what it prints. A program whose product is what
    it prints should rather fail.
    """
    with ExitStack() as kept:
        for stream, name, redirect in (
            (sys.stdout, "stdout", redirect_stdout),
            (sys.stderr, "stderr", redirect_stderr),
        ):
            if stream is not None:  # of a program that was started without one
                kept.callback(forget_unwritten, stream)
                kept.enter_context(redirect(cast(TextIO, LossyStream(stream, name))))
        yield


class Lock(Enum):
    """The result of trying to lock a file."""

    OURS = "ours"
    OTHERS = "another process has it"
    NONE = "its file system has no locks"  # Lustre with noflock, NFS without its lock daemon


def lock(file: IO[bytes], shared: bool = False) -> Lock:
    """Tries to lock an open file; shared: with others that lock it so too."""
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
    """Appends pieces of text, each at once. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it."""
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    @property
    def size(self) -> int:
        """Bytes in it."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, text: str) -> None:
        """Appends all of the text. Raises OSError, and leaves the file as it was, if it cannot.

        Names of files that are not UTF-8 are written with escapes.
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

        On a file system without locks it does nothing.
        """
        return lock(self._file) is not Lock.OTHERS

    def close(self) -> None:
        """Closes the file. No method may be called afterwards."""
        self._file.close()


class OutLog(logging.FileHandler):
    """Appends every record to a file, or loses it."""

    def _open(self) -> Any:
        return LossyStream(super()._open(), self.baseFilename)


class WallTime:
    """Seconds since 1970 that go on evenly when somebody sets the clock of the system: its time at
    the start, and the time that has passed since.
    """

    def __init__(self, at_least: float = -math.inf) -> None:
        """Reads the system's clock, for the only time.

        at_least: seconds since 1970 of what was logged before, where the clock may be behind it.
        """
        self._start = max(time.time(), at_least) - _seconds_elapsed()

    def now(self) -> float:
        """Returns the seconds since 1970; never less than before."""
        return self._start + _seconds_elapsed()


def _seconds_elapsed() -> float:
    """Returns seconds that no setting of the clock changes; on Linux with those of a suspend."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
