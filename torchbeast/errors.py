# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and the two kinds of error that a program shows as one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2

_COMPILED = ("libtorchbeast", "nest")
_PACKAGE = re.escape(str(Path(__file__).resolve().parent))
_OUR_FRAME = re.compile(rf'^  File "{_PACKAGE}/.*\n(?:    .*\n)*', re.MULTILINE)
_EMPTY_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?! )")


class UsageError(ValueError):
    """A request of the user that cannot be met: exit code 2. The message says what to change."""


class RunError(RuntimeError):
    """A failure of the run: exit code 1. The message names the origin and what happened there."""


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Raises a UsageError with the same sentence in place of a ValueError of the body."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def exit_code_of(program: str, body: Callable[[], int]) -> int:
    """Runs `body` and returns its exit code.

    A UsageError or RunError becomes one sentence on stderr and the exit code of its kind.
    """
    try:
        return body()
    except UsageError as error:
        return _report(program, str(error), EXIT_USAGE)
    except RunError as error:
        return _report(program, str(error), EXIT_FAILURE)
    except ImportError as error:
        if error.name not in _COMPILED:
            raise
        return _report(program, f"{error}. MonoBeast works without it.", EXIT_FAILURE)
    except KeyboardInterrupt:
        return _report(program, "interrupted before the run began.", 130)


def without_our_frames(message: str) -> str:
    """Returns the message with only the user's own code in the tracebacks that it quotes.

    A traceback with nothing but our own code is removed: its last line says everything.
    """
    theirs = _OUR_FRAME.sub("", message)
    return _EMPTY_TRACEBACK.sub("", theirs)


def _report(program: str, message: str, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr, flush=True)
    return code
