# SPDX-License-Identifier: Apache-2.0
"""What the main of every child process does first; the other end is child_process.py."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from torchbeast.errors import RunError, UsageError

Report = Callable[[dict[str, Any]], None]


def take_stdout() -> Report:
    """Keeps stdout for reports; what is printed from now on, by C code too, goes to stderr."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def report(message: dict[str, Any]) -> None:
        pipe.write(f"{json.dumps(message)}\n")
        pipe.flush()

    return report


def take_stdin() -> BinaryIO:
    """Keeps stdin for what the program says; it is empty for whoever else reads it from now on,
    processes that an environment starts included.

    A thread may wait in the pipe until the end, which Python does not forgive of sys.stdin.
    """
    pipe = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipe


def failure(error: BaseException) -> dict[str, Any]:
    """The report of an error. Our own about a wrong name or a taken address needs no traceback."""
    usage = type(error).__name__ == "EnvError" or isinstance(error, UsageError)
    own = usage or isinstance(error, (ConnectionError, RunError))
    message = str(error) if own else "".join(traceback.format_exception(error))
    return {"error": message, "usage": usage}
