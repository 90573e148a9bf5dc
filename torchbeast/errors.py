# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and the two kinds of errors that a program prints without a traceback."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import shlex
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, NoReturn, TextIO

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_COMPILED = ("libtorchbeast", "nest")
_PACKAGE = os.path.dirname(__file__)  # as in tracebacks, also behind a symbolic link
_TORCH = r"[^\"\n]*/(?:site|dist)-packages/torch"
_OUR_FRAME = re.compile(
    rf'^  File "(?:{re.escape(_PACKAGE)}|{_TORCH})/.*\n(?:    .*\n)*', re.MULTILINE
)
_LIBRARIES = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}/|.*/(?:site|dist)-packages/")
_EMPTY_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?! )")

COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""The sequences that set colours in a terminal."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # without line ends and tabs

_TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = '  File "'
_LONGEST_LINE = 300  # characters
_REMEMBERED = 100  # number of different tracebacks that are shown once only


class UsageError(ValueError):
    """A request that cannot be met. The message says what to change; programs exit with code 2."""


class IncompatibleParts(ValueError):
    """Parts of a Scheme that do not work together. The message names both."""


class RunError(RuntimeError):
    """A failure of the run. The message names its origin and what happened; programs exit with code
    1.
    """


def readable(text: str) -> str:
    """Returns a text without what a terminal would obey: messages quote strangers' files and other
    machines' words.
    """
    return _CONTROLS.sub("?", COLOURS.sub("", text))


@contextmanager
def as_usage_error(what: str = "") -> Iterator[None]:
    """Converts a ValueError of the body to a UsageError with the same message.

    The body must not call code of users, whose exceptions keep their type and traceback.

    what: names the place of the error, in front of the message.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{what}: {error}" if what else str(error)) from error


@contextmanager
def running_users_code(what_failed: str) -> Iterator[None]:
    """Converts an exception of the body, which calls code of users, to a RunError with its message
    and traceback. A UsageError or RunError stays what it is.

    what_failed: in front of the message, such as "my_env:make failed".
    """
    try:
        yield
    except (UsageError, RunError):
        raise
    except (Exception, SystemExit) as error:
        # Without a cause, because of which a StopIteration would be raised again (PEP 479).
        raise RunError(f"{what_failed}: {what_it_raised(error)}") from None


@contextmanager
def refusing_paths(remedy: str, path: Path | str | None = None) -> Iterator[None]:
    """Converts an OSError of the body, which uses paths that the user gave, to a UsageError.

    remedy: what the user can do, such as "give another --savedir". path: of the body, if it uses
    no other; the error of a full disk does not name it.
    """
    try:
        yield
    except OSError as error:
        what = path or error.filename or "the current folder"  # os.getcwd does not set it
        room = "free some space there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UsageError(f"{what} cannot be used ({error.strerror}): {room}{remedy}") from None


@contextmanager
def naming_limit(what: str) -> Iterator[None]:
    """Converts the error of a body that starts a thread or a process, if a limit of the system
    forbids it, to a RunError with a remedy.

    what: "thread" or "process".
    """
    try:
        yield
    except (BlockingIOError, RuntimeError) as error:
        raise RunError(
            f"no {what} can be started ({error}): raise the limit of threads (ulimit -u, or "
            "pids.max of a container), or use fewer workers"
        ) from None


def started(thread: Thread) -> Thread:
    """Starts a thread and returns it. Raises RunError if there may be no more threads."""
    with naming_limit("thread"):
        thread.start()
    return thread


def expanded(path: str | Path) -> Path:
    """Returns a path with the home directory in place of a leading ~.

    Raises OSError if the home directory is unknown, for example for a container's user without an
    entry in /etc/passwd.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "its home directory is unknown", str(path)) from None


def end_imports_in_one_line() -> None:
    """Lets Ctrl-C, or a package that is not installed, end one of our programs without a traceback
    while Python imports it, until `exit_code_of` takes over.

    A KeyboardInterrupt would be shown with the traceback of an import, or caught by a library. It
    does nothing in other programs, which may import the package while Python looks for them, too.
    """
    is_module = _module().partition(".")[0] == "torchbeast" and sys.argv[0] == "-m"
    if not is_module and Path(sys.argv[0]).name != "torchbeast":  # the console script
        return
    sys.excepthook = _name_missing_package
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_interrupted)


def _end_interrupted(*_: object) -> NoReturn:
    os._exit(_report(_program(), "interrupted.", EXIT_INTERRUPTED))


def _name_missing_package(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Prints an uncaught exception: one line if a module of ours imports a package that is not
    installed.
    """
    importing = [f.f_code.co_filename for f, _ in traceback.walk_tb(frames)]
    importing = [file for file in importing if not file.startswith("<")]  # Python's own import
    if not isinstance(error, ModuleNotFoundError) or not _is_ours(importing[-1]):
        sys.__excepthook__(kind, error, frames)
        return
    source = Path(_PACKAGE).parent
    made, is_clone = source / ".venv/bin/python", (source / "pyproject.toml").exists()
    package = str(source) if is_clone else "torchbeast"
    remedy = f"run the program with {made}, or " if made.exists() else ""
    message = f"{sys.executable} has no package {error.name}: {remedy}install what is missing: "
    message += shlex.join([sys.executable, "-m", "pip", "install", package])
    os._exit(_report(_program(), message, EXIT_USAGE))


def _program() -> str:
    return _module().rpartition(".")[2] or "torchbeast"


def _module() -> str:
    """Returns the module of `python -m module`, or ""."""
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def exit_code_of(program: str, body: Callable[[], int]) -> int:
    """Runs `body` and returns its exit code.

    For a UsageError or RunError it prints the message to stderr and returns the exit code of its
    kind, even if writing to stderr fails.
    """
    if signal.getsignal(signal.SIGINT) is _end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have any bytes
        is_utf_8 = sys.stdout.encoding.lower() == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf_8 else "backslashreplace")
    try:
        return body()
    except (UsageError, RunError) as error:
        code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
        return _report(program, str(error), code)
    except ImportError as error:
        if error.name not in _COMPILED:
            raise
        return _report(program, f"{error}. MonoBeast works without it.", EXIT_USAGE)
    except KeyboardInterrupt:
        return _report(program, "interrupted.", EXIT_INTERRUPTED)
    finally:
        forget_unwritten(sys.stderr)


def exit_now(code: int) -> NoReturn:
    """Flushes stdout and stderr, then ends the process without finalising Python, which might wait
    for threads or abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        forget_unwritten(stream)
    os._exit(code)


def forget_unwritten(stream: TextIO | None) -> None:
    """Drops the output that a stream could not write. Otherwise Python would try again at its exit,
    and end with code 120 instead of the program's exit code.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "wb") as nothing:  # a stream without a descriptor
            kept = os.dup(stream.fileno())
            os.dup2(nothing.fileno(), stream.fileno())
            stream.flush()
            os.dup2(kept, stream.fileno())
            os.close(kept)


def without_our_frames(message: str) -> str:
    """Returns the message with only the user's own code in the tracebacks that it quotes.

    PyTorch's frames are removed as well. A traceback without other frames is reduced to its last
    line, which says everything.
    """
    theirs = _OUR_FRAME.sub("", message)
    return _EMPTY_TRACEBACK.sub("", theirs)


def failure(error: BaseException) -> dict[str, Any]:
    """Returns an error as a report. UsageError and RunError do not need a traceback."""
    usage = isinstance(error, UsageError)
    is_ours = usage or isinstance(error, RunError)
    message = str(error) if is_ours else "".join(traceback.format_exception(error))
    return {"error": message, "usage": usage}


def error_of(report: Mapping[str, Any]) -> Exception:
    """Returns the error that another process has reported, see `failure`."""
    return UsageError(report["error"]) if report["usage"] else RunError(report["error"])


def what_it_raised(error: BaseException) -> str:
    """Returns the error as text, with only the user's code in its traceback."""
    return without_our_frames("".join(traceback.format_exception(error))).strip()


def what_users_code_raised(error: BaseException) -> str:
    """Returns the error with its lines of traceback if the user's code raised it, else "".

    User's code is outside TorchBeast, the standard library and installed packages.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    called_by_us = itertools.dropwhile(lambda file: not _is_ours(file), files)
    is_theirs = any(not _is_ours(file) and not _LIBRARIES.match(file) for file in called_by_us)
    return what_it_raised(error) if is_theirs or isinstance(error, SyntaxError) else ""


def _is_ours(file: str) -> bool:
    return file.startswith(f"{_PACKAGE}/")


class RepeatedFailures:
    """Shows the traceback of failing environments once, and repetitions as a single line.

    Environments of one kind mostly fail in the same place. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def shortened(self, report: str) -> str:
        """Returns the report: completely the first time, later as one line."""
        head, found, traceback = report.partition(_TRACEBACK)
        place = "".join(line for line in traceback.splitlines() if line.startswith(_FRAME))
        if place in self._seen:
            return f"{head}{in_one_line(report)} (an earlier report has the traceback)"
        if found and len(self._seen) < _REMEMBERED:
            self._seen.add(place)
        return report


def in_one_line(report: str) -> str:
    """Returns a report as one line of at most 300 characters; for a traceback, the first line of
    its last exception.
    """
    line = " ".join(report.split())
    if _TRACEBACK in report:
        raised = report.rpartition(_FRAME)[2].splitlines()[1:]
        line = next((line for line in raised if line[:1].strip()), "")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def _report(program: str, message: str, code: int) -> int:
    with suppress(OSError):  # stderr on a full disk; the exit code remains
        print(f"{program}: {readable(message)}", file=sys.stderr, flush=True)
    return code
