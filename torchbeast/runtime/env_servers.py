# SPDX-License-Identifier: Apache-2.0
"""The environment-server processes of a program: started, watched, ended.

A server that ends before `close` fails the run.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchbeast.runtime.addresses import socket_path
from torchbeast.runtime.child_process import ChildProcess, end_all
from torchbeast.runtime.env_plan import ServerPlan
from torchbeast.runtime.errors import RunError
from torchbeast.runtime.supervisor import Supervisor

_READY_S = 120.0


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
        return [server.process.pid for server in self._servers]

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
        end_all(server.process for server in self._servers)
        for server in self._servers:
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
    """One server process and its socket."""

    def __init__(self, index: int, supervisor: Supervisor, arguments: dict[str, Any]) -> None:
        self.index = index
        self.ready = threading.Event()
        self._address = arguments["address"]
        name = f"environment server {index}"
        self.process = ChildProcess(
            name,
            "torchbeast.runtime.env_process",
            arguments,
            on_report=lambda report: self.ready.set(),
            on_end=lambda error: supervisor.fail(f"{name} at {self._address}", error),
        )

    def remove_socket(self) -> None:
        """Removes the socket of a server that had to be killed; never one that another holds."""
        path = socket_path(self._address)
        if path is not None and self.ready.is_set():
            path.unlink(missing_ok=True)
