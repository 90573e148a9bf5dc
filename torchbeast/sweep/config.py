# SPDX-License-Identifier: Apache-2.0
"""Settings of a sweep, and the flags of its program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchbeast.core.base.checks import Settings, above, at_least, require, setting
from torchbeast.errors import expanded, refusing_paths
from torchbeast.reporting.run_folder import RunConfig, check_name_of_folder, new_name
from torchbeast.sweep.search import Search

SchedulerName = Literal["none", "asha", "pbt"]
ProgramName = Literal["monobeast", "polybeast", "raybeast"]


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Settings):
    """Trains agents with every combination of some settings, and ranks them.

    Every flag that is not listed below is passed to the program that trains the agents:
    python -m torchbeast.monobeast --help lists them.
    """

    set: tuple[str, ...] = ()
    """Flags to vary, each with its values, such as learning_rate=0.0003,0.0006 use_lstm=true,false.
    One agent is trained with each combination. Agents that differ only in seed are ranked together,
    by their median."""
    trials: int | None = setting(None, bounds=(at_least, 1))
    """Number of settings to draw, each trained with every seed. --set then takes ranges too, such
    as learning_rate=0.0001:0.01, which is drawn on a logarithmic scale. Default: train all
    combinations of the values."""
    search: Search = "sobol"
    """Sampling of --trials: sobol spreads the settings evenly, random draws them independently."""
    program: ProgramName | None = None
    """Program that trains the agents. Default: monobeast."""
    name: str | None = setting(None, bounds=(check_name_of_folder,))
    """Name of the sweep. The name of an earlier sweep continues it with its recorded settings, but
    repeat --scheduler asha, --parallel and --on: unfinished agents resume, finished ones stay as
    they are. Default: a timestamp and a random number."""
    savedir: str = RunConfig.savedir
    """Parent folder: the sweep's files are in {savedir}/{name}, which has a folder per agent."""
    parallel: int | None = setting(None, bounds=(at_least, 1))
    """Number of agents that train at the same time and share the cores. Default: one per core; all
    of them with --shared_replay."""
    shared_replay: bool = False
    """Share one replay of --replay_size steps among all agents. The replay starts empty, even if
    you continue a sweep."""
    on: Literal["local", "ray"] = "local"
    """Where agents train: on this machine (local), or on a Ray cluster whose nodes all see
    --savedir (ray; needs pip install 'torchbeast[ray]')."""
    address: str | None = None
    """Ray cluster of --on ray: auto (the cluster to which this machine belongs) or HOST:PORT of its
    head node. Default: $RAY_ADDRESS if set, else start Ray on this machine for this sweep. With
    --on local, passed on to agents of raybeast."""
    scheduler: SchedulerName = "none"
    """asha (Li et al. 2020) ends weak agents early: it compares mean returns at 1/27, 1/9 and 1/3
    of the steps and continues an agent only if it is in the top third. pbt (population based
    training, Jaderberg et al. 2017) lets weak agents continue from the checkpoints of good ones,
    with changed settings. none: train every agent to the end."""
    rounds: int | None = setting(None, bounds=(at_least, 1))
    """Number of equal parts of the steps, after each of which --scheduler pbt compares the agents.
    Default: 10."""
    agent_cpus: float = setting(1.0, bounds=(above, 0))
    """CPUs that Ray reserves for each agent, which uses that many. Needs --on ray."""
    agent_gpus: float = setting(0.0, bounds=(at_least, 0))
    """GPUs that Ray reserves for each agent, which sees only these. Needs --on ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rounds is None or self.scheduler == "pbt",
            f"rounds {self.rounds} needs --scheduler pbt: add it, or remove rounds",
        )
        require(
            self.on == "ray" or (self.agent_cpus, self.agent_gpus) == (1.0, 0.0),
            "agent_cpus and agent_gpus need --on ray: add it, or remove them",
        )
        require(
            self.on == "local" or not (self.address or "").startswith("ray://"),
            "a sweep must run inside the cluster: start it on one of its nodes with --address "
            f"auto, or submit it as a job, instead of joining {self.address}",
        )

    def folder(self) -> Path:
        """Returns the sweep's folder, {savedir}/{name}; without a name, a new one at each call."""
        with refusing_paths("use another --savedir"):
            return expanded(self.savedir).absolute() / (self.name or new_name("sweep"))
