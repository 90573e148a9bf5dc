# SPDX-License-Identifier: Apache-2.0
"""An agent of a sweep on a node of a Ray cluster; ray_tune.py, which alone imports Ray, calls it.

    sweep --- a file in the sweep's folder ---> Trial: the agents that are to end
                                                  v ChildProcess
                                                agent_main.py: the agent's program

Tune itself gives a trial that it ends a few seconds; a checkpoint may take longer. So an agent is
asked to end by the file, and its trial ends once its process has.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchbeast.processes.cores import environment_of_share
from torchbeast.reporting.run_folder import is_in_use
from torchbeast.sweep.agent_main import GRACE_S
from torchbeast.sweep.local import RunningAgent
from torchbeast.sweep.settings import Agent
from torchbeast.sweep.table import Row

STEP, RETURN = "step", "mean_episode_return"  # of results, as Tune's schedulers are told them
ENDED, WHY = "agent_ended", "why"
HELD = "is_held"  # another process runs in the agent's folder

_NAME = ".asked-to-end"
_EVERY_S = 1.0
_END_S = 10.0  # beyond the agent's own time limit

Result = dict[str, Any]


class Requests:
    """Names of agents that are to end, in a file that all nodes see.

    It is opened for every look, because a file system of several machines (NFS) promises to show
    what others wrote before the opening, and no more.
    """

    def __init__(self, folder: Path) -> None:
        """Prepares reading and writing; folder: of the sweep."""
        self._path = folder / _NAME

    def create(self) -> None:
        """Makes the file, empty."""
        self._path.write_text("")

    def add(self, name: str) -> None:
        """Asks an agent to end. May be called by several threads."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")

    def has(self, name: str) -> bool:
        """Returns whether the agent is to end; raises OSError where the file cannot be read."""
        return name in self._path.read_text(encoding="utf-8").splitlines()

    def remove(self) -> None:
        """Removes the file."""
        with contextlib.suppress(OSError):
            self._path.unlink()


class Trial:
    """Runs an agent and reports how far it is. Used by one thread."""

    def __init__(
        self,
        agent: Agent,
        cores: int,
        more: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prepares running it with so many cores.

        more: flags beside those of the agent. environment: variables of its process.
        """
        self._agent, self._more = agent, more
        self._environment = {**environment_of_share(cores), **environment}
        self._requests = Requests(agent.folder.parent)
        self._running: RunningAgent | None = None
        self._row = Row(agent)

    def step(self) -> Result:
        """Waits a moment; returns the newest figures, and the end once the process has ended."""
        try:
            is_asked = self._requests.has(self._agent.name)
        except OSError as error:
            self.end()
            return self._ended(self._not_seen(error))
        if is_asked:
            return self._ended(self.end())
        # The process of an earlier part of the sweep may still write its checkpoint.
        if self._running is None and not is_in_use(self._agent.folder):
            self._running = RunningAgent(self._row)
            self._running.start(self._environment, self._more)
        time.sleep(_EVERY_S)
        self._row.follow()
        if self._running is not None and self._running.death is not None:
            self._running.end_row()
            return self._ended(self._row.why)
        return {**self._figures(), HELD: self._running is None}

    def end(self) -> str:
        """Lets the agent write its checkpoint and end; returns why it failed, or ""."""
        running, self._running = self._running, None
        if running is not None:
            running.child.ask_to_end()
            running.child.end_by(time.monotonic() + GRACE_S + _END_S)
            running.end_row()
        return self._row.why

    def _figures(self) -> Result:
        """Returns the figures that there are: a scheduler leaves out what it is not told."""
        figures = self._row.figures
        found = {
            STEP: figures.step,
            "episodes": figures.episodes,
            RETURN: figures.mean_return,
            "steps_per_second": self._row.steps_per_second,
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _ended(self, why: str) -> Result:
        return {**self._figures(), ENDED: True, WHY: why, "done": True}

    def _not_seen(self, error: OSError) -> str:
        folder, host = self._agent.folder.parent, socket.gethostname()
        return (
            f"node {host} does not see the sweep's folder {folder} ({error.strerror}): give a "
            "--savedir that is on a disk of all nodes, such as NFS"
        )
