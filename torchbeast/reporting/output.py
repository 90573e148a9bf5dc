# SPDX-License-Identifier: Apache-2.0
"""Output of a run. A failure to write it never ends the run.

    stdout and stderr   LossyStream: loses lines if the disk is full or the reader is gone
    out.log             OutLog, over a LossyStream

When writing works again, the number of lost lines is written first. A file can be locked against
other processes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from enum import Enum
from typing import IO, Any, TextIO, cast

from torchbeast.errors import forget_unwritten
from torchbeast.fleets.system import close_in_forks

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
                self._fail(error, lost=text.count("\n"))
        else:
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

    def _fail(self, error: OSError, lost: int = 0) -> None:
        # First, because the warning may come here too, and a stream that lost nothing looks mended.
        self._is_failing, self._lost = True, self._lost + lost
        _log.warning(
            f"{self._name} cannot be written ({error.strerror}): output to it is lost meanwhile; "
            "the run continues"
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
    OTHERS = "another process holds it"
    NONE = "its file system does not support locks"  # Lustre with noflock, NFS without lock daemon


def lock(file: IO[bytes], shared: bool = False) -> Lock:
    """Tries to lock an open file, and closes it in forks of this process; shared: together with
    others that do the same.
    """
    close_in_forks(file)  # a worker of the user's pool or DataLoader would keep it locked
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.OTHERS
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.NONE
        raise
    return Lock.OURS


class OutLog(logging.FileHandler):
    """Appends every record to a file, or loses it."""

    def _open(self) -> Any:
        return LossyStream(super()._open(), self.baseFilename)
