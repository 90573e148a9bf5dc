# SPDX-License-Identifier: Apache-2.0
"""Settings of a sweep, and the flags of its program."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchbeast.core.base.checks import above, at_least, require
from torchbeast.errors import expanded, refusing_paths

Scheduler = Literal["none", "asha"]
ProgramName = Literal["monobeast", "polybeast", "raybeast"]


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The agents of a sweep, and how they run. All other flags are those of the agents' program,
    which lists them with --help."""

    set: tuple[str, ...] = ()
    """Flags to vary, each with its values, such as learning_rate=0.0003,0.0006 use_lstm=true,false:
    an agent learns with each combination. The values of seed are ranked together, by their
    median."""
    program: ProgramName | None = None
    """Program of the agents. Default: monobeast."""
    name: str | None = None
    """Name of the sweep. The name of an earlier sweep continues it with its recorded settings:
    complete agents are left alone, others resume. Default: made from the time."""
    savedir: str = "~/logs/torchbeast"
    """Parent folder: the sweep's files are in {savedir}/{name}, with a folder for each agent."""
    parallel: int | None = None
    """Number of agents that learn at the same time; they share the cores. Default: one for each
    core; all of them with --shared_replay."""
    shared_replay: bool = False
    """Let all agents learn from one replay of --replay_size steps, in which each stores what it
    collects. It begins empty, also when the sweep is continued."""
    on: Literal["local", "ray"] = "local"
    """Where agents learn: on this machine, or on a Ray cluster, all nodes of which must see
    --savedir. Needs pip install 'torchbeast[ray]'."""
    address: str | None = None
    """Ray cluster of --on ray: auto (the one that this machine belongs to) or HOST:PORT of its
    head. Default: $RAY_ADDRESS, else start Ray on this machine alone, for as long as the sweep.
    With --on local it is that of agents of raybeast."""
    scheduler: Scheduler = "none"
    """Whether agents end early: asha compares mean returns at 1/27, 1/9 and 1/3 of the steps, where
    the best third goes on."""
    agent_cpus: float = 1.0
    """CPUs of a node that Ray reserves for each agent. An agent uses as many. Needs --on ray."""
    agent_gpus: float = 0.0
    """GPUs of a node that Ray reserves for each agent, which sees no others. Needs --on ray."""

    def __post_init__(self) -> None:
        at_least(1, parallel=self.parallel)
        at_least(0, agent_gpus=self.agent_gpus)
        above(0, agent_cpus=self.agent_cpus)
        require(
            self.on == "ray" or (self.agent_cpus, self.agent_gpus) == (1.0, 0.0),
            "agent_cpus and agent_gpus are of Ray: give --on ray too, or leave them out",
        )
        require(
            self.on == "local" or not (self.address or "").startswith("ray://"),
            "a sweep is a part of the cluster: start it on one of its nodes with --address auto, "
            f"or submit it as a job, instead of joining {self.address}",
        )
        name = self.name
        require(
            name is None or (name not in ("", ".", "..", "latest") and "/" not in name),
            f"name must be a plain name of a folder other than 'latest', got {name!r}",
        )

    def folder(self) -> Path:
        """Returns the sweep's folder, {savedir}/{name}; a new one at each call without a name."""
        new = f"sweep-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        with refusing_paths("give another --savedir"):
            return expanded(self.savedir).absolute() / (self.name or new)


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Trains agents with every combination of some settings, and ranks them.

    Every flag that is not listed below is passed to the program that trains the agents:
    python -m torchbeast.monobeast --help lists them.
    """

    sweep: SweepConfig = field(default_factory=SweepConfig)
