# SPDX-License-Identifier: Apache-2.0
"""The environment-server processes of a program: started, watched, ended.

    program --- stdin ---> env_process     closed (also by the program's death): the server ends
            <-- stdout --                  one line of JSON: it serves, or why it cannot
            <-- stderr --                  goes to out.log; the last lines are shown when it dies

Each server has a thread that waits for its end, and one that reads its stderr. A server that ends
before `close` fails the run. The processes are started fresh, never forked: they hold none of the
learner's memory.
"""

from __future__ import annotations

import collections
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from torchbeast.runtime.addresses import socket_path
from torchbeast.runtime.env_plan import ServerPlan
from torchbeast.runtime.errors import RunError, UsageError
from torchbeast.runtime.supervisor import Supervisor

_log = logging.getLogger("torchbeast.env_servers")

_STDERR_LINES = 20
_READY_S = 120.0
_GRACE_S = 5.0  # from closing a server's stdin to SIGTERM
_KILL_S = 2.0  # from SIGTERM to SIGKILL


class EnvServers:
    """One process for each plan; server i listens at addresses[i]."""

    def __init__(
        self,
        supervisor: Supervisor,
        env_id: str,
        plans: Sequence[ServerPlan],
        addresses: Sequence[str],
        folder: Path | None = None,
    ) -> None:
        """`folder`: a folder of this run for its sockets, removed when the servers end."""
        self.addresses = list(addresses)
        self._folder = folder
        self._servers = [
            _Server(i, supervisor, _arguments(env_id, plan, address, folder))
            for i, (plan, address) in enumerate(zip(plans, addresses, strict=True))
        ]
        self._supervisor = supervisor

    @property
    def pids(self) -> list[int]:
        """The process ids of the servers."""
        return [server.pid for server in self._servers]

    def wait_ready(self, timeout: float = _READY_S) -> bool:
        """Waits until all serve; false when the run ended first.
        A server that is too slow fails it.
        """
        deadline = time.monotonic() + timeout
        while not all(server.ready.is_set() for server in self._servers):
            if self._supervisor.wait(0.02):
                return False
            if time.monotonic() > deadline:
                slow = [s.index for s in self._servers if not s.ready.is_set()]
                error = RunError(f"not ready within {timeout:g} s: environment servers {slow}")
                self._supervisor.fail("start", error)
        return not self._supervisor.ended

    def close(self) -> None:
        """Ends every server, by force when it must be, and removes the sockets.
        May be called again.
        """
        for server in self._servers:
            server.ask_to_end()
        deadline = time.monotonic() + _GRACE_S
        for server in self._servers:
            server.end_by(deadline)
            server.remove_socket()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _arguments(env_id: str, plan: ServerPlan, address: str, folder: Path | None) -> dict[str, Any]:
    return {
        "env_id": env_id,
        "address": address,
        "num_streams": plan.num_streams,
        "envs_per_stream": plan.envs_per_stream,
        "folder": None if folder is None else str(folder),
    }


class _Server:
    """One process and the two threads that watch it."""

    def __init__(self, index: int, supervisor: Supervisor, arguments: dict[str, Any]) -> None:
        self.index = index
        self.ready = threading.Event()
        self._address = arguments["address"]
        self._supervisor = supervisor
        self._closing = False
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._process = _start(arguments)
        self._stderr_reader = self._thread("stderr", self._read_stderr)
        self._watcher = self._thread("watch", self._watch)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_to_end(self) -> None:
        self._closing = True
        _stream(self._process.stdin).close()

    def end_by(self, deadline: float) -> None:
        if not self._ended_by(deadline):
            self._process.terminate()
        if not self._ended_by(max(deadline, time.monotonic()) + _KILL_S):
            self._process.kill()
        self._process.wait()
        self._watcher.join(_KILL_S)

    def remove_socket(self) -> None:
        """Removes the socket of a server that had to be killed; never one that another holds."""
        path = socket_path(self._address)
        if path is not None and self.ready.is_set():
            path.unlink(missing_ok=True)

    def _ended_by(self, deadline: float) -> bool:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _thread(self, what: str, body: Any) -> threading.Thread:
        thread = threading.Thread(target=body, name=f"env-server-{self.index}-{what}", daemon=True)
        thread.start()
        return thread

    def _watch(self) -> None:
        with _stream(self._process.stdout) as stdout:
            report = _parse(stdout.readline())
        if report.get("ready"):
            self.ready.set()
        self._process.wait()
        self._stderr_reader.join(_KILL_S)
        if not self._closing:
            self._supervisor.fail(f"environment server {self.index}", self._error(report))

    def _read_stderr(self) -> None:
        with _stream(self._process.stderr) as stderr:
            for line in stderr:
                text = line.decode(errors="replace").rstrip()
                self._stderr.append(text)
                _log.info("environment server %d: %s", self.index, text)

    def _error(self, report: dict[str, Any]) -> Exception:
        if report.get("usage"):
            return UsageError(report["error"])
        if "error" in report:
            return RunError(report["error"])
        said = "".join(f"\n  {line}" for line in self._stderr)
        return RunError(
            f"process {self.pid} at {self._address} {_how_it_ended(self._process.returncode)}"
            + (f"; it last said:{said}" if said else "")
        )


def _start(arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "torchbeast.runtime.env_process", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the program alone, which ends its servers in order
    )


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # opened as a pipe
    return stream


def _parse(line: bytes) -> dict[str, Any]:
    """The report of a server; {} when it died before it could write one."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"
