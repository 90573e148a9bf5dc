# SPDX-License-Identifier: Apache-2.0
"""A child process that a program starts, watches and ends.

    program --- stdin ---> child     closed (also by the program's death): the child ends
            <-- stdout --            lines of JSON: its reports
            <-- stderr --            goes to out.log; the last lines are shown when it dies

Children are spawned, never forked, so they share none of the program's memory. Three threads serve
each child: one reads its reports, one its stderr, and one waits for the process itself, because
processes that the child forked may keep its pipes open after its death. The child leads a process
group, which is killed when the child ends.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from torchbeast.errors import RunError, UsageError

_log = logging.getLogger("torchbeast.children")

_STDERR_LINES = 20
_LONGEST_LINE = 65_536  # bytes of stderr: a progress bar never ends its line
_GRACE_S = 5.0  # from closing a child's stdin to SIGKILL
_REST_S = 2.0  # for the last output of a child that has ended
KILLED = "was killed by"  # in the error of a child that a signal ended

Report = dict[str, Any]


class ChildProcess:
    """A running `python -m module` with one JSON argument.

    on_report: called with every report, from a thread that serves this child.
    on_end: called once, after the last report and from another such thread, when the child ends
        without having been asked to. Its argument is the error that the child reported as
        {"error": ..., "usage": ...}, or a description of how it died.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Mapping[str, Any],
        on_report: Callable[[Report], None],
        on_end: Callable[[Exception], None],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the child; raises OSError when the system cannot, as for too long arguments."""
        self.name = name
        self._on_report, self._on_end = on_report, on_end
        self._closing = False
        self._error_report: Report = {}
        self._has_ended = threading.Event()
        self._given_up = ""  # the reason it was killed
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches the program alone, which ends its children
        )
        self._readers = [
            self._thread("stdout", self._read_reports),
            self._thread("stderr", self._read_stderr),
        ]
        self._watcher = self._thread("watch", self._watch)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended; `end_by` then waits for its last reports."""
        return self._has_ended.is_set()

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes one line of JSON to the child's stdin; a no-op once it has ended."""
        stdin = _stream(self._process.stdin)
        with contextlib.suppress(OSError, ValueError):  # a broken pipe, or closed by ask_to_end
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()

    def ask_to_end(self) -> None:
        """Closes the child's stdin. From now on its end is not a failure."""
        self._closing = True
        with contextlib.suppress(OSError):  # unwritten data for a dead child
            _stream(self._process.stdin).close()

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (by time.monotonic), then kills the child."""
        if not self._has_ended.wait(max(0.0, deadline - time.monotonic())):
            self._process.kill()
            self._has_ended.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_REST_S)

    def give_up(self, why: str) -> None:
        """Kills the child at once; the error given to `on_end` says why."""
        self._given_up = why
        self._process.kill()

    def _thread(self, what: str, body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=body, name=f"{self.name}-{what}", daemon=True)
        thread.start()
        return thread

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
            _log.warning("%s failed while it was closing: %s", self.name, self._error())

    def _wait_for_group(self) -> None:
        """Waits for the end of the child, and ends what it has left behind."""
        if not hasattr(os, "waitid"):  # on macOS before Python 3.13
            self._process.wait()
            self._end_group()
            return
        with contextlib.suppress(ChildProcessError):  # `kill` has found it dead
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._end_group()  # before its number may become that of another group
        self._process.wait()

    def _end_group(self) -> None:
        """Kills the processes that the child forked and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there are none
            os.killpg(self.pid, signal.SIGKILL)

    def _read_reports(self) -> None:
        with _stream(self._process.stdout) as stdout:
            for line in stdout:
                report = _parse(line)
                if "error" in report:
                    self._error_report = report
                    if not self._has_ended.wait(_GRACE_S):  # it may wait for a process it forked
                        self._process.kill()
                elif report:
                    self._on_report(report)

    def _read_stderr(self) -> None:
        with _stream(self._process.stderr) as stderr:
            for line in iter(lambda: stderr.readline(_LONGEST_LINE), b""):
                text = line.decode(errors="replace").rstrip()
                self._stderr.append(text)
                _log.info("%s: %s", self.name, text)

    def _error(self) -> Exception:
        report = self._error_report
        if report.get("usage"):
            return UsageError(report["error"])
        if report:
            return RunError(report["error"])
        said = "".join(f"\n  {line}" for line in self._stderr)
        how = self._given_up or _how_it_ended(self._process.returncode)
        return ProcessDied(f"process {self.pid} {how}" + (f"; it last said:{said}" if said else ""))


class ProcessDied(RunError):
    """A child ended without reporting an error: it was killed, or crashed outside of Python."""


def show_output() -> None:
    """Shows what children write to stderr, in programs that have no out.log for it."""
    logging.basicConfig(format="%(message)s")
    _log.setLevel(logging.INFO)


def end_all(children: Iterable[ChildProcess]) -> None:
    """Asks all children to end, and kills those that do not within the grace period."""
    ending = list(children)
    for child in ending:
        child.ask_to_end()
    deadline = time.monotonic() + _GRACE_S
    for child in ending:
        child.end_by(deadline)


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # opened as a pipe
    return stream


def _parse(line: bytes) -> Report:
    """Parses a report; returns {} for a line that a dying child did not complete."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    return f"{KILLED} {signal.Signals(-returncode).name}"
