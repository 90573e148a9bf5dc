# SPDX-License-Identifier: Apache-2.0
"""Setup at the start of every child process; child_process.py is the parent's side."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from torchbeast import errors
from torchbeast.errors import failure
from torchbeast.fleets.system import is_lost
from torchbeast.fleets.waiting import running_time, wait_until

_GRACE_S = 3.0  # to finish a step after stdin is closed; a stuck environment is abandoned

SendReport = Callable[[dict[str, Any]], None]


def run(body: Callable[[SendReport], None]) -> int:
    """Runs the body of a child's main, and returns the exit code.

    Only the parent ends this process. body: called with the function that writes reports; an
    exception that it raises is the last report.
    """
    follow_parent()
    report = take_stdout()
    try:
        body(report)
    except Exception as error:
        report(failure(error))
        return 1
    return 0


def follow_parent() -> None:
    """Lets only the parent end this process; the first call of a child's main.

    It ignores signals that ask a program to stop. If they are sent to all processes of a program,
    as systemd and Slurm do, the parent then ends its children in order. Processes that this one
    forks or starts do not ignore these signals. They are killed when this process ends, usually by
    the parent, or here if the parent is gone.
    """
    _ignore_signals()
    atexit.register(_kill_group_of_orphan)


def exit_now(code: int) -> NoReturn:
    """Exits without waiting for threads, which may be stuck in an environment."""
    _kill_group_of_orphan()
    errors.exit_now(code)


def _kill_group_of_orphan() -> None:
    """Kills this process and all that it forked, if its parent is gone (nobody reads stdout)."""
    if is_lost(2, pipes=True) and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _ignore_signals() -> None:
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    # a handler, because programs that it starts would inherit SIG_IGN
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def take_stdout() -> SendReport:
    """Reserves stdout for reports, and redirects all other output to stderr, even of C code.

    Returns a function that writes a report.
    """
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    lock = threading.Lock()  # so that threads write whole lines

    def report(message: dict[str, Any]) -> None:
        with lock:
            pipe.write(f"{json.dumps(message)}\n")
            pipe.flush()

    return report


def follow_stdin(
    on_line: Callable[[bytes], None], on_end: Callable[[], None], grace_s: float = _GRACE_S
) -> None:
    """Calls `on_line` with every line of stdin and `on_end` at its end. The process exits `grace_s`
    seconds later.

    A thread reads stdin, so that it notices the end even if the main thread is busy.
    """
    stdin = take_stdin()

    def read() -> None:
        for line in stdin:
            on_line(line)
        with contextlib.suppress(OSError):  # already closed
            on_end()
        wait_until(running_time() + grace_s, threading.Event().wait)
        exit_now(0)

    threading.Thread(target=read, daemon=True).start()


def take_stdin() -> BinaryIO:
    """Reserves stdin for the parent's messages and returns it.

    All other readers of stdin, including processes that an environment starts, find it empty. The
    result is a separate file, because a thread that is blocked in sys.stdin breaks Python's exit.
    """
    pipe = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipe
