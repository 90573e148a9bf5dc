# SPDX-License-Identifier: Apache-2.0
"""Settings of a sweep."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchbeast.core.checks import at_least, require

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

    def __post_init__(self) -> None:
        at_least(1, parallel=self.parallel)
        name = self.name
        require(
            name is None or (name not in ("", ".", "..", "latest") and "/" not in name),
            f"name must be a plain name of a folder other than 'latest', got {name!r}",
        )

    def folder(self) -> Path:
        """Returns the sweep's folder, {savedir}/{name}; a new one at each call without a name."""
        new = f"sweep-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return Path(self.savedir).expanduser().absolute() / (self.name or new)
