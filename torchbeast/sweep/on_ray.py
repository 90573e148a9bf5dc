# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep on the nodes of a Ray cluster.

    Runner --- ProcessOnRay ---> TorchBeastAgent: a Ray actor on some node, one for each agent
                                      v ChildProcess
                                 agent_main.py: the agent's program
                                      ^ v  columns, if agents share a replay
                                 ray_replay.py: a Ray actor on the sweep's node

Ray decides where and when agents run. The sweep reads their metrics from their files, as it does
for agents on this machine.
"""

from __future__ import annotations

import functools
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torchbeast.cli.command_line import parse
from torchbeast.errors import RunError
from torchbeast.processes.child_process import ChildProcess, Report
from torchbeast.processes.system import environment_of_share
from torchbeast.schemes.config import RayConfig
from torchbeast.schemes.ray_fleet import Actors, RayFleet, User
from torchbeast.schemes.ray_replay import serving_on_ray
from torchbeast.schemes.room import Group, Node, Room, check_room
from torchbeast.sources.sharing.service import Served
from torchbeast.sweep.agents import FLAGS, Agent
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.runner import Asha, Runner, RunningAgent, process_here

_EVERY_S = 1.0
_ADDRESS = "RAY_ADDRESS"
_SWEEP = User(
    "sweep",
    "Its agents write checkpoints where Ray lets them; the same --name continues it.",
    # When Ray ends an actor, it does not kill the agent, which notices and writes its checkpoint.
    {"RAY_kill_child_processes_on_worker_exit": "false"},
)


class Joining(NamedTuple):
    """What lets agents join a shared replay: flags, and variables of their environment."""

    words: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})


NO_REPLAY = Joining()


class TorchBeastAgent:
    """An agent on a node of a cluster, as a Ray actor. Its process ends when the actor does."""

    LANES = MappingProxyType({"ask_to_end": "asking"})

    def __init__(self, name: str) -> None:
        self._process: ChildProcess | None = None
        self._report: Report | None = None
        self._death: Exception | None = None
        self._is_asked = False

    def begin(self) -> None:
        """Returns once Ray has made the actor."""

    def run(self, agent: Agent, cores: int, joining: Joining) -> Report | None:
        """Runs the agent's program with so many cores; returns its last report, or None if it was
        asked to end and has none.
        """
        if not (parent := agent.folder.parent).is_dir():
            why = f"node {socket.gethostname()} does not see the sweep's folder {parent}: give a "
            return {"why": f"{why}--savedir that is on a disk of all nodes, such as NFS"}
        environment = {**environment_of_share(cores), **joining.environment}
        self._process = process_here(
            agent, joining.words, environment, self._on_report, self._on_end
        )
        if self._is_asked:
            self._process.ask_to_end()
        while not self._process.has_ended:
            time.sleep(_EVERY_S)
        self._process.end_by(time.monotonic())
        return self._report or (None if self._death is None else {"why": str(self._death)})

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end."""
        self._is_asked = True
        if self._process is not None:
            self._process.ask_to_end()

    def _on_report(self, report: Report) -> None:
        self._report = report

    def _on_end(self, error: Exception) -> None:
        self._death = error


class ProcessOnRay:
    """The process of an agent on a node of a cluster. Used by the main thread."""

    def __init__(
        self, fleet: RayFleet, cores: int, joining: Joining, running: RunningAgent
    ) -> None:
        """Asks for an actor, which runs the agent once there is room for it."""
        self._running, self._end = running, threading.Event()
        agent = running.row.agent
        self._worker = fleet.worker(agent.name)
        self._worker.call(self._on_begin, "begin")
        self._worker.call(self._on_end, "run", agent, cores, joining)

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended, or was lost."""
        return self._end.is_set()

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end."""
        self._worker.call(lambda _: None, "ask_to_end")

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (by time.monotonic), then ends the actor, and its process too."""
        self._end.wait(max(0.0, deadline - time.monotonic()))
        self._worker.kill()

    def _on_begin(self, result: Any) -> None:
        if not isinstance(result, Exception):
            self._running.on_begin()

    def _on_end(self, result: Any) -> None:
        if isinstance(result, Exception):
            self._running.on_end(RunError(f"Ray lost it: {result}"))
        elif result is not None:
            self._running.on_report(result)
        self._end.set()


@contextmanager
def on_ray(
    config: SweepConfig, agents: Sequence[Agent], shared_replay: bool, asha: Asha | None = None
) -> Iterator[tuple[Runner, Served | None]]:
    """Joins the cluster, or starts Ray here; ends it, or leaves it as it was.

    Yields what runs agents, and the replay that they share, if they do.

    Raises RunError without Ray or cluster, and UsageError where no agent has room.
    """
    name, ray = agents[0].folder.parent.name, RayConfig(address=config.address)
    cpus, gpus = config.agent_cpus, config.agent_gpus
    actors = Actors(TorchBeastAgent, TorchBeastAgent.LANES, {"num_cpus": cpus, "num_gpus": gpus})
    with RayFleet(ray, f"sweep {name}", _is_own_code(agents), _SWEEP, actors) as fleet:
        check_room(fleet.room(), [Group("agent", 1, cpus, gpus)])

        def runner(joining: Joining) -> Runner:
            start = functools.partial(ProcessOnRay, fleet, max(1, int(cpus)), joining)
            return Runner(_how(config, fleet), config.parallel or len(agents), start, asha)

        if not shared_replay:
            yield runner(NO_REPLAY), None
            return
        at_once = agents_at_once(config, fleet.room(), len(agents))
        if at_once < len(agents):
            print(
                f"{at_once} of {len(agents)} agents begin now: the others join the shared "
                "replay later."
            )
        # On this node, whose end is that of the sweep anyway.
        with serving_on_ray(replay_name(name), num_cpus=0.0, node=fleet.own_node) as served:
            words = [f"--replay_service={served.address}"]
            yield runner(Joining(words, {_ADDRESS: fleet.cluster})), served


def _how(config: SweepConfig, fleet: RayFleet) -> str:
    gpus = f" and {config.agent_gpus:g} GPUs" if config.agent_gpus else ""
    return f"with {config.agent_cpus:g} CPUs{gpus} each, by {fleet}"


def agents_at_once(config: SweepConfig, room: Room, agents: int) -> int:
    """Returns how many agents Ray has room for now, of those that --parallel lets begin: free CPUs,
    and nodes with what each needs.
    """
    free = math.floor(room.free_cpus / config.agent_cpus + 1e-9)
    fitting = sum(_fitting(config, node) for node in room.nodes)
    return min(agents, config.parallel or agents, free, fitting)


def _fitting(config: SweepConfig, node: Node) -> int:
    """Returns the number of agents that one node has room for if it is used by nobody else."""
    shares = [node.cpus / config.agent_cpus]
    if config.agent_gpus:
        shares.append(node.gpus / config.agent_gpus)
    return math.floor(min(shares) + 1e-9)


def replay_name(sweep: str) -> str:
    """Returns a new name of a shared replay: other sweeps of this name may be on the cluster."""
    return f"sweep-{re.sub(r'[^A-Za-z0-9_.-]', '_', sweep)}-{secrets.token_hex(4)}"


def _is_own_code(agents: Sequence[Agent]) -> bool:
    """Whether nodes must import a module of the user's."""
    all_flags: list[Any] = [
        parse(FLAGS[agent.program], agent.program, agent.words) for agent in agents
    ]
    return any(
        ":" in name
        for flags in all_flags
        for name in (flags.environment.spec.name, flags.model.spec.name)
    )
