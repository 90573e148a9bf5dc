# SPDX-License-Identifier: Apache-2.0
"""Starts, watches, replaces and ends the environment-server processes of a program.

A server that dies without a report (killed, or crashed in native code) is replaced at the same
address, so that the learner's streams find the new one. If the replacement cannot start, the next
attempt follows after a pause. If a server ends in any other way before `close`, the run fails.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchbeast.collect.config import split_evenly
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import started
from torchbeast.fleets.child_process import ChildProcess, ChildReport, ProcessDied, end_all
from torchbeast.fleets.supervisor import RestartPolicy, Restarts, Supervisor
from torchbeast.fleets.system import available_cores, environment_of_share
from torchbeast.fleets.waiting import Timer, waiting_for
from torchbeast.servers.addresses import socket_path
from torchbeast.servers.config import FleetConfig, SecurityConfig

_log = logging.getLogger("torchbeast.servers")

_START_S = 600.0  # to start serving, or else it is killed; the same limit as for a step
_READY_POLL_S = 0.02


@dataclass(frozen=True)
class ServerPlan:
    """The environments of one server process."""

    num_streams: int
    envs_per_stream: int

    @property
    def num_envs(self) -> int:
        """Number of environments of the server."""
        return self.num_streams * self.envs_per_stream


def spread(num_envs: int, num_servers: int, num_streams: int = 2) -> list[ServerPlan]:
    """Returns one plan per server; together they serve `num_envs` environments.

    A stream is a group of environments that are stepped together. With two streams, a server steps
    one group while actions are chosen for the other. With one stream, inference batches are twice
    as large, which is better if inference and servers share cores, because these are busy anyway.

    Environments are assigned in groups of `num_streams`, so that all streams of a server have the
    same size, or one by one if there are too few.
    """
    groups, single = divmod(num_envs, num_streams)
    counts = split_evenly(num_envs, num_servers)
    if groups >= num_servers:
        counts = [num_streams * n for n in split_evenly(groups, num_servers)]
        counts[-1] += single
    streams = [1 if n % num_streams else num_streams for n in counts]
    return [ServerPlan(each, n // each) for each, n in zip(streams, counts, strict=True)]


def plans_for_local_servers(fleet: FleetConfig, disable_cuda: bool) -> list[ServerPlan]:
    """Returns the plans of servers on the learner's machine.

    Each has two streams if the learner uses a GPU, else one.
    """
    on_gpu = seems_to_have_a_gpu() and not disable_cuda
    return spread(fleet.environments(), fleet.servers(), num_streams=2 if on_gpu else 1)


def seems_to_have_a_gpu() -> bool:
    """Returns whether there is a GPU driver, without importing torch, which takes seconds."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not is_hidden and any(
        Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    )


class EnvServers:
    """The processes of several servers, one for each plan; server i listens at addresses[i].

    Threads: every server has threads that watch and replace its process. Any thread may call
    `close`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        env: EnvSpec,
        plans: Sequence[ServerPlan],
        addresses: Sequence[str],
        folder: str | None = None,
        security: SecurityConfig | None = None,
        learners: Sequence[str] = (),
        say: Callable[[str, str], None] = lambda learner, sentence: None,
    ) -> None:
        """Starts the processes.

        folder: a folder of this run for its sockets, see `run_folder`.
        security: for servers that listen to other machines, or dial in to learners.
        learners: HOST:PORT of learners. Servers do not listen, but dial in to them when `dial` is
            called; the streams are divided among the learners. say: called with a learner and a
            message about it.
        """
        self.addresses = list(addresses)
        self._restarts = Restarts(_log)
        self._supervisor = self._restarts.supervisor = supervisor
        self._say, self._may_dial = say, False
        # Else NumPy starts a thread for each core of the machine in every server.
        self.environment = environment_of_share(max(1, available_cores() // len(plans)))
        self._servers = []
        streams = itertools.cycle(learners)
        common = {
            "num_servers": len(plans),
            "folder": folder,
            # only names of files, because process lists show arguments
            "security": None if security is None else asdict(security),
        }
        firsts = itertools.accumulate((plan.num_envs for plan in plans), initial=0)
        for i, (plan, address, first) in enumerate(zip(plans, addresses, firsts, strict=False)):
            dialled = list(itertools.islice(streams, plan.num_streams))
            served = {"env": env.dealt(first, plan.num_envs).as_json(), "address": address}
            own = {"learners": dialled, **served, **asdict(plan)}
            self._servers.append(_Server(i, common | own, self))
        try:
            for server in self._servers:
                self._restarts.start(server)
        except Exception:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """IDs of the server processes."""
        return [child.pid for child in self._children()]

    def activity(self) -> dict[str, ChildReport]:
        """Returns the last report of each server by its address: "steps" of its environments since
        its process started, and "open_streams"; {} if a process does not serve yet.
        """
        return {server.address: server.activity for server in self._servers}

    @property
    def replaced(self) -> int:
        """Number of replacements of processes that died."""
        return self._restarts.replaced

    def dial(self) -> None:
        """Lets the servers dial in to their learners."""
        self._may_dial = True
        for child in self._children():
            child.send({"dial": True})

    def wait_ready(self) -> bool:
        """Waits until all servers accept connections; returns False if the run ends before that.

        If a server cannot start, or takes ten minutes, the run fails. Once a minute, a warning
        names the servers that are not ready yet.
        """

        def slow() -> list[str]:
            return [str(server.index) for server in self._servers if not server.ready.is_set()]

        of = len(self._servers)
        with waiting_for(lambda: f"environment server {', '.join(slow())} of {of}, or Ctrl-C"):
            while slow():
                if self._supervisor.wait(_READY_POLL_S):
                    return False
        return not self._supervisor.ended

    def close(self) -> None:
        """Ends every server, kills servers that do not end in time, and removes the sockets.

        May be called again.
        """
        self._restarts.close()
        end_all(self._children())
        for server in self._servers:
            server.limit.cancel()
            server.remove_socket()

    def _children(self) -> list[ChildProcess]:
        """Returns the processes that were started."""
        return [server.process for server in self._servers if server.process is not None]

    # --- called by the threads that watch the servers

    def reported(self, server: _Server, report: ChildReport) -> None:
        """Handles a report: that a server works, what it does, or a message about a learner."""
        if "ready" in report:
            server.limit.cancel()
            self._restarts.works(server)
            server.ready.set()
            if self._may_dial and server.process is not None:
                server.process.send({"dial": True})
        elif "steps" in report:
            server.activity = report
        elif "run_has_ended" in report:
            self._supervisor.stop("the learner's run has ended")
        else:
            self._say(report["learner"], report["said"])

    def ended(self, server: _Server, error: Exception) -> None:
        """Replaces a server, or fails the run, unless the run has ended."""
        server.limit.cancel()
        if not isinstance(error, ProcessDied):
            server.ready.clear()  # its socket is gone, or belongs to another process
        if not self._supervisor.ended:
            self._restarts.ended(server, error)


class _Server:
    """A server: its current process, and its socket."""

    process: ChildProcess | None = None

    def __init__(self, index: int, arguments: dict[str, Any], group: EnvServers) -> None:
        self.index, self.address = index, str(arguments["address"])
        self.name = f"environment server {index} at {self.address}"
        self.activity: ChildReport = {}
        self.ready = threading.Event()
        self.restart_policy = RestartPolicy()
        self.limit = Timer(_START_S, self._give_up)
        self._arguments, self._group = arguments, group

    def start(self) -> None:
        """Starts a process: the first one, or a replacement."""
        self.activity = {}
        if (folder := self._arguments["folder"]) is not None:  # the last server may have removed it
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self.limit.cancel()
        self.limit = Timer(_START_S, self._give_up)
        self.limit.daemon = True
        started(self.limit)  # before the process can serve
        self.process = ChildProcess(
            f"environment server {self.index}",
            "torchbeast.servers.server_main",
            self._arguments,
            on_report=functools.partial(self._group.reported, self),
            on_end=functools.partial(self._group.ended, self),
            environment=self._group.environment,
        )

    def _give_up(self) -> None:
        if self.process is not None:
            self.process.give_up(
                f"did not serve within {_START_S / 60:.0f} minutes, and was killed"
            )

    def remove_socket(self) -> None:
        """Removes the socket of a killed server, but not the socket of another process."""
        path = socket_path(self.address)
        if path is not None and self.ready.is_set():
            path.unlink(missing_ok=True)
