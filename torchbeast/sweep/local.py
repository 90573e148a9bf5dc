# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep as processes of this machine, some at a time.

    LocalRunner --- ChildProcess ---> agent_main.py: the agent's program, one process each
                                          v
                      logs.csv, meta.json, model.tar in the agent's folder

An agent ends with the sweep, however that ends: its standard input is then closed. It leads a
session of its own, so Ctrl-C reaches the sweep alone, which lets each agent write a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchbeast.processes.child_process import ChildProcess, Report
from torchbeast.processes.cores import environment_of_share
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.run_folder import is_in_use
from torchbeast.sweep.agent_main import GRACE_S
from torchbeast.sweep.table import Row

_EVERY_S = 1.0
_END_S = 10.0  # beyond the agents' own time limit


@dataclass(frozen=True)
class Share:
    """The agents that learn at the same time, and the cores that each uses."""

    agents: int
    cores: int

    def __str__(self) -> str:
        threads = f"{self.cores} core{'s' if self.cores > 1 else ''} each"
        return f"{self.agents} at a time, with {threads}"


def share_of(agents: int, parallel: int | None, cores: int) -> Share:
    """Divides the cores: by default an agent for each, and each agent at least one."""
    at_once = min(agents, parallel or cores)
    return Share(at_once, max(1, cores // at_once))


@dataclass
class RunningAgent:
    """A process of an agent, and its end, which threads of ChildProcess note."""

    row: Row
    child: ChildProcess = field(init=False)
    report: Report | None = None
    death: Exception | None = None
    first_step: int = field(init=False)  # learnt by earlier processes

    def __post_init__(self) -> None:
        self.first_step = self.row.figures.step

    def start(self, environment: Mapping[str, str], more: Sequence[str]) -> None:
        """Starts the process; more: flags beside those of the agent."""
        agent = self.row.agent
        arguments = {"program": agent.program, "words": [*agent.words, *more]}
        self.child = ChildProcess(
            name=agent.name,
            module="torchbeast.sweep.agent_main",
            arguments=arguments,
            on_report=self._on_report,
            on_end=self._on_end,
            environment=environment,
        )
        self.row.start()

    def _on_report(self, report: Report) -> None:
        self.report = report

    def _on_end(self, error: Exception) -> None:
        self.death = error

    def end_row(self) -> None:
        """Notes the end in the row, once the process has ended."""
        if self.report is not None:
            self.row.end(self.report.get("why"))
        elif self.death is not None:
            self.row.end(str(self.death))
        else:
            has_begun = self.row.figures.step > self.first_step
            self.row.end("it did not write its checkpoint in time" if has_begun else None)


class LocalRunner:
    """Runs agents on this machine. Used by the main thread."""

    def __init__(self, share: Share, more: Sequence[str] = ()) -> None:
        """Prepares running them; more: flags that all agents are given too."""
        self._share, self._more = share, more
        self._environment = environment_of_share(share.cores)
        self._running: list[RunningAgent] = []

    def __str__(self) -> str:
        return str(self._share)

    def run(self, rows: Sequence[Row], supervisor: Supervisor, show: Callable[[], None]) -> None:
        """Runs all agents that wait, until they or the sweep have ended; calls `show` often."""
        while not supervisor.ended:
            self._start(rows)
            if not self._running and not any(row.state == "waiting" for row in rows):
                break
            supervisor.wait(_EVERY_S)
            self._follow()
            show()
        self._stop(show)

    def _start(self, rows: Sequence[Row]) -> None:
        """Starts agents that wait while there is room.

        The process of an earlier part of the sweep that was killed may still write its checkpoint.
        """
        for row in rows:
            if len(self._running) >= self._share.agents:
                return
            if row.state != "waiting":
                continue
            row.hold(is_in_use(row.agent.folder))
            if not row.is_held:
                running = RunningAgent(row)
                running.start(self._environment, self._more)
                self._running.append(running)

    def _follow(self) -> None:
        for running in list(self._running):
            running.row.follow()
            if running.death is not None:
                self._running.remove(running)
                running.end_row()

    def _stop(self, show: Callable[[], None]) -> None:
        """Lets all agents write a checkpoint and end."""
        for running in self._running:
            running.row.stop()
            running.child.ask_to_end()
        show()
        deadline = time.monotonic() + GRACE_S + _END_S
        for running in self._running:
            running.child.end_by(deadline)
            running.end_row()
            show()
        self._running.clear()
