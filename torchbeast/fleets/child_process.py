# SPDX-License-Identifier: Apache-2.0
"""A child process that a program starts, watches and ends: the parent's side and the child's side.

    program --- stdin ---> child     the child ends when it is closed, or the program dies
            <-- stdout --            reports, as lines of JSON
            <-- stderr --            goes to out.log, up to an allowance; the last lines are shown
                                     if the child dies

Children are spawned, never forked, so they do not share the program's memory. Three threads serve
each child: one reads its reports, one reads its stderr, and one waits for the process itself, since
processes that the child has forked may keep its pipes open after its death. The child leads a
process group, which is killed when the child ends.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, BinaryIO, NoReturn

from torchbeast import errors
from torchbeast.errors import RunError, error_of, failure, naming_limit, started
from torchbeast.fleets.system import close_in_forks, is_lost
from torchbeast.fleets.waiting import running_time, wait_until

_log = logging.getLogger("torchbeast.children")

_STDERR_LINES = 20
_LONGEST_LINE = 65_536  # bytes of stderr, because progress bars never end their line
_ALLOWANCE, _ALLOWANCE_PER_S = 1_000_000, 100  # bytes of stderr that are logged
_OVERHEAD = 200  # bytes of a log record, in addition to the line
_GRACE_S = 5.0  # from closing a child's stdin to SIGKILL
_LAST_STEP_S = 3.0  # to finish a step after stdin is closed; a stuck environment is abandoned
_REST_S = 2.0  # to receive the last output of a child that has ended
KILLED = "was killed by"  # part of the error if a signal ended the child
# Like `python -m module`, but with the parent's sys.path in place of the current folder, so that
# both import the same files. PYTHONPATH would pass it on to every program that an environment
# starts, which may have another version of Python. Digits are the descriptor of a file with a long
# argument.
_START = (
    "import sys; sys.path[:] = dict.fromkeys({path!a} + [*filter(None, sys.path)]); "
    "sys.argv[2] = open(int(sys.argv[2])).read() if sys.argv[2].isdecimal() else sys.argv[2]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

_LONGEST_ARGUMENT = 100_000  # characters; Linux refuses more than 131,071 bytes

ChildReport = dict[str, Any]
SendReport = Callable[[ChildReport], None]


class ChildProcess:
    """A running `python -m module` with one JSON argument. It can import what its parent can.

    on_report: called with every report, in one of the threads that serve this child.
    on_end: called once, after the last report and in another of these threads, if the child ends
        without being asked to. Its argument is the error that the child has reported, as {"error":
        ..., "usage": ...}, or a description of how it died.
    pid: the child's process ID.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Mapping[str, Any],
        on_report: Callable[[ChildReport], None],
        on_end: Callable[[Exception], None],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the child.

        Raises OSError if the system cannot, and RunError if there may be no more processes or
        threads.
        """
        self.name = name
        self._on_report, self._on_end = on_report, on_end
        self._closing = False
        self._error_report: ChildReport = {}
        self._has_ended = threading.Event()
        self._given_up = ""  # the reason it was killed
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        text = json.dumps(arguments)
        with naming_limit("process"), contextlib.ExitStack() as sent:
            if len(text) > _LONGEST_ARGUMENT:
                file = sent.enter_context(tempfile.TemporaryFile("w+"))
                file.write(text)
                file.seek(0)
                text, pass_fds = str(file.fileno()), (file.fileno(), *pass_fds)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=path), module, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C only reaches the program, which ends its children
            )
        close_in_forks(_stream(self._process.stdin))  # else the child would outlive the program
        self.pid = self._process.pid
        try:
            self._readers = [
                self._thread("stdout", self._read_reports),
                self._thread("stderr", self._read_stderr),
            ]
            self._watcher = self._thread("watch", self._watch)
        except RunError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended. Call `end_by` to wait for its last reports."""
        return self._has_ended.is_set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes one line of JSON to the child's stdin; does nothing if the child has ended."""
        stdin = _stream(self._process.stdin)
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, or closed by ask_to_end
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

    def ask_to_end(self) -> None:
        """Closes the child's stdin. From now on, its end does not count as a failure."""
        self._closing = True
        with contextlib.suppress(OSError):  # unwritten data for a dead child
            _stream(self._process.stdin).close()

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (of running_time), then kills the child."""
        if not wait_until(deadline, self._has_ended.wait):
            self._process.kill()
            self._has_ended.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_REST_S)

    def give_up(self, why: str) -> None:
        """Kills the child immediately, with this reason in the error for `on_end`."""
        self._given_up = why
        self._process.kill()

    def _thread(self, what: str, body: Callable[[], None]) -> threading.Thread:
        return started(threading.Thread(target=body, name=f"{self.name}-{what}", daemon=True))

    def _watch(self) -> None:
        try:
            self._wait_for_group()
        finally:
            self._has_ended.set()
        deadline = time.monotonic() + _REST_S  # a process outside the group may hold a pipe
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if not self._closing:
            self._on_end(self._error())
        elif self._error_report:
            _log.warning("%s failed while closing: %s", self.name, self._error())

    def _wait_for_group(self) -> None:
        """Waits for the end of the child, and kills what it leaves behind."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # `kill` has already reaped it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # on macOS before Python 3.13
            self._process.wait()
        # before another group can get its number
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _read_reports(self) -> None:
        with _stream(self._process.stdout) as stdout:
            for line in stdout:
                try:
                    report: ChildReport = json.loads(line)
                except ValueError:
                    continue  # an incomplete line of a dying child
                if not isinstance(report, dict) or not report:
                    continue  # printed by other code before the child took its stdout
                if "error" in report:
                    self._error_report = report
                    deadline = running_time() + _GRACE_S  # it may wait for its own child
                    if not wait_until(deadline, self._has_ended.wait):
                        self._process.kill()
                else:
                    self._on_report(report)

    def _read_stderr(self) -> None:
        """Logs the output, and keeps its last lines. It limits what goes into the log, so that an
        environment that prints in every step does not fill the disk.
        """
        allowance, read_at, left_out = float(_ALLOWANCE), time.monotonic(), 0
        with _stream(self._process.stderr) as stderr:
            for line in iter(lambda: stderr.readline(_LONGEST_LINE), b""):
                text = line.decode(errors="replace").rstrip()
                self._stderr.append(text)
                elapsed, size = time.monotonic() - read_at, len(line) + _OVERHEAD
                allowance = min(_ALLOWANCE, allowance + elapsed * _ALLOWANCE_PER_S)
                read_at += elapsed
                if size > allowance:
                    left_out += 1
                    continue
                allowance -= size
                self._say_left_out(left_out)
                _log.info("%s: %s", self.name, text)
                left_out = 0
        self._say_left_out(left_out)

    def _say_left_out(self, count: int) -> None:
        if count:
            _log.info("%s: (%d lines omitted: too much output)", self.name, count)

    def _error(self) -> Exception:
        if self._error_report:
            return error_of(self._error_report)
        said = "".join(f"\n  {line}" for line in self._stderr)
        how = self._given_up or _how_it_ended(self._process.returncode)
        return ProcessDied(f"process {self.pid} {how}" + (f"; last output:{said}" if said else ""))


class ProcessDied(RunError):
    """A child ended without reporting an error: it was killed, or crashed outside Python."""


def show_output() -> None:
    """Shows what children write to stderr, for programs that do not have an out.log."""
    logging.basicConfig(format="%(message)s")
    _log.setLevel(logging.INFO)


def end_all(children: Iterable[ChildProcess]) -> None:
    """Asks all children to end, and kills them after a grace period."""
    ending = list(children)
    for child in ending:
        child.ask_to_end()
    deadline = running_time() + _GRACE_S
    for child in ending:
        child.end_by(deadline)


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # opened as a pipe
    return stream


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    names = {number.value: number.name for number in signal.Signals}  # not all have one
    return f"{KILLED} {names.get(-returncode, f'signal {-returncode}')}"


# --- the child's side


def run_child(body: Callable[[SendReport], None]) -> int:
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
    before = {  # handlers, because programs that it starts would inherit SIG_IGN
        number: signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)
    atexit.register(_kill_group_of_orphan)


def exit_now(code: int) -> NoReturn:
    """Exits without waiting for threads, which may be stuck in an environment."""
    _kill_group_of_orphan()
    errors.exit_now(code)


def _kill_group_of_orphan() -> None:
    """Kills this process and all that it forked, if its parent is gone (nobody reads stdout)."""
    if is_lost(2, pipes=True) and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def take_stdout() -> SendReport:
    """Reserves stdout for reports, and redirects all other output to stderr, even of C code.

    Returns a function that writes a report.
    """
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    lock = threading.Lock()  # so that threads write whole lines

    def report(message: ChildReport) -> None:
        with lock:
            pipe.write(f"{json.dumps(message)}\n")
            pipe.flush()

    return report


def follow_stdin(
    on_line: Callable[[bytes], None], on_end: Callable[[], None], grace_s: float = _LAST_STEP_S
) -> None:
    """Calls `on_line` with every line of stdin and `on_end` at its end. The process exits `grace_s`
    seconds later.

    A thread reads stdin, so that it notices the end even if the main thread is busy.
    """
    stdin = take_stdin()

    def read() -> None:
        try:
            for line in stdin:
                on_line(line)
            with contextlib.suppress(OSError):  # already closed
                on_end()
        except Exception:  # the process must not outlive its parent
            traceback.print_exc()
        wait_until(running_time() + grace_s, threading.Event().wait)
        exit_now(0)

    started(threading.Thread(target=read, daemon=True))


def take_stdin() -> BinaryIO:
    """Reserves stdin for the parent's messages and returns it.

    All other readers of stdin, including processes that an environment starts, find it empty. The
    result is a separate file, because a thread that is blocked in sys.stdin breaks Python's exit.
    """
    pipe = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return pipe
