# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep on the nodes of a Ray cluster.

    Runner --- ProcessOnRay ---> SweepAgent: a Ray actor on some node, one for each agent
                                      v ChildProcess
                                 agent_main.py: the agent's program
                                      ^ v  columns, if agents share a replay
                                 on_ray/replay.py: a Ray actor on the sweep's node

Ray decides where and when agents run. The sweep reads their metrics from their files, like the
metrics of agents on this machine.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torchbeast.collect.shared_replay import Served
from torchbeast.fleets.child_process import ChildProcess, ChildReport
from torchbeast.fleets.system import environment_of_share
from torchbeast.fleets.waiting import running_time, wait_until
from torchbeast.on_ray.config import RayConfig, WorkerGroup, check_room
from torchbeast.on_ray.fleet import Actors, RayFleet, User
from torchbeast.on_ray.replay import serving_on_ray
from torchbeast.sweep.agents import AgentRun
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.runner import Asha, Runner, process_here
from torchbeast.sweep.table import AgentRow

_AGENT = "torchbeast.sweep.on_ray:SweepAgent"
_EVERY_S = 1.0
_ADDRESS = "RAY_ADDRESS"
_SWEEP = User(
    "sweep",
    "Its agents have saved checkpoints where possible; the same --name continues it.",
    # When Ray ends an actor, it does not kill the agent, which then writes its checkpoint.
    {"RAY_kill_child_processes_on_worker_exit": "false"},
)


class SweepAgent:
    """An agent on a node of a cluster, as a Ray actor. Its process ends with the actor."""

    LANES = MappingProxyType({"ask_to_end": "asking"})

    def __init__(self, name: str) -> None:
        self._process: ChildProcess | None = None
        self._is_asked = False

    def begin(self) -> None:
        """Returns when Ray has made the actor."""

    def run(
        self, agent: AgentRun, cores: int, more: Sequence[str], environment: Mapping[str, str]
    ) -> ChildReport | None:
        """Runs the agent's program with this number of cores. Returns its last report, or None if
        it was asked to end and did not report.

        more: additional flags for the agent. environment: variables of its process.
        """
        if not (parent := agent.folder.parent).is_dir():
            why = f"node {socket.gethostname()} cannot access the sweep's folder {parent}: use a "
            return {"why": f"{why}--savedir that is on a disk of all nodes, such as NFS"}
        reports: list[ChildReport] = []
        variables = {**environment_of_share(cores), **environment}
        self._process = process_here(agent, more, variables, reports.append)
        if self._is_asked:
            self._process.ask_to_end()
        while not self._process.has_ended:
            time.sleep(_EVERY_S)
        self._process.end_by(running_time())
        return next(iter(reports), None)

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end."""
        self._is_asked = True
        if self._process is not None:
            self._process.ask_to_end()


class ProcessOnRay:
    """The process of an agent on a node of a cluster. Used by the main thread."""

    def __init__(self, fleet: RayFleet, row: AgentRow, *how: Any) -> None:
        """Requests an actor, which runs the agent when there is room for it.

        how: further arguments of SweepAgent.run.
        """
        self._row, self._end = row, threading.Event()
        self._worker = fleet.worker(row.agent.name)
        self._worker.call(self._on_begin, "begin")
        self._worker.call(self._on_end, "run", row.agent, *how)

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended, or was lost."""
        return self._end.is_set()

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end."""
        self._worker.call(lambda _: None, "ask_to_end")

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (of running_time), then ends the actor and its process."""
        wait_until(deadline, self._end.wait)
        self._worker.kill()

    def _on_begin(self, result: Any) -> None:
        if not isinstance(result, Exception):
            self._row.begin()

    def _on_end(self, result: Any) -> None:
        if isinstance(result, Exception):
            self._row.on_report({"why": f"lost by Ray: {result}"})
        elif result is not None:
            self._row.on_report(result)
        self._end.set()


def on_ray(
    ending: ExitStack, config: SweepConfig, agents: Sequence[AgentRun], asha: Asha | None = None
) -> tuple[Runner, Served | None]:
    """Joins the cluster, or starts Ray here, which `ending` ends again.

    Returns the runner of the agents, and the replay that they share, or None.

    Raises RunError without Ray or a cluster, and UsageError if there is no room for any agent.
    """
    name, ray = agents[0].folder.parent.name, RayConfig(address=config.address)
    cpus, gpus = config.agent_cpus, config.agent_gpus
    has_own_code = any(agent.has_own_code for agent in agents)
    actors = Actors(_AGENT, {"num_cpus": cpus, "num_gpus": gpus}, last_calls=())
    fleet = ending.enter_context(RayFleet(ray, f"sweep {name}", has_own_code, _SWEEP, actors))
    check_room(fleet.room(), [WorkerGroup("agent", 1, cpus, gpus)])
    served, more, environment = None, [], {}
    if config.shared_replay:  # on this node, without which the sweep ends anyway
        replay = serving_on_ray(replay_name(name), num_cpus=0.0, node=fleet.own_node)
        served = ending.enter_context(replay)
        more = [f"--replay_service={served.address}"]
        environment = {_ADDRESS: fleet.cluster}

    def start(row: AgentRow) -> ProcessOnRay:
        return ProcessOnRay(fleet, row, max(1, int(cpus)), more, environment)

    how = f"with {cpus:g} CPUs and {gpus:g} GPUs each, by {fleet}"
    return Runner(how, config.parallel or len(agents), start, asha), served


def replay_name(sweep: str) -> str:
    """Returns a new name for a shared replay, unique even among sweeps with the same name."""
    return f"sweep-{re.sub(r'[^A-Za-z0-9_.-]', '_', sweep)}-{secrets.token_hex(4)}"
