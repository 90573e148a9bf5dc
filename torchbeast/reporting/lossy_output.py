# SPDX-License-Identifier: Apache-2.0
"""Output of a run to stdout and stderr, which a full disk or a dead reader behind them cannot end.

print, rich, logging, code of users --> sys.stdout, sys.stderr --> a file, a pipe, a terminal
                                        LossyStream: counts the lines that it loses
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from torchbeast.errors import forget_unwritten

_log = logging.getLogger("torchbeast.output")


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

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each, or loses it."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream; what it could not write stays with it, to be tried again."""
        if self._is_failing:
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._is_failing = True
        _log.info(
            "%s cannot be written (%s): what the program says is lost there until it can; "
            "the run goes on",
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
