# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep, some at a time, and decides which end early.

    Runner --- start ---> ChildProcess, or ProcessOnRay ---> agent_main.py: the agent's program
                                                                 v
                                       logs.csv, meta.json, model.tar in the agent's folder

An agent ends with the sweep, however that ends: its standard input is then closed. It leads a
session of its own, so Ctrl-C reaches the sweep alone, which lets each agent write a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from torchbeast.errors import RunError
from torchbeast.processes.child_process import ChildProcess, Report
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.run_folder import is_in_use
from torchbeast.sweep.agent_main import GRACE_S
from torchbeast.sweep.agents import Agent
from torchbeast.sweep.table import Row

_FACTOR, _RUNGS = 3, 3  # the best third goes on at 1/27, 1/9 and 1/3 of the steps


class Asha:
    """Compares each agent at some steps, its rungs, with the agents that came as far before it."""

    def __init__(self, total_steps: int) -> None:
        """total_steps: of the agents; the smallest number if they differ."""
        first = max(1, total_steps // _FACTOR**_RUNGS)
        rungs = [first * _FACTOR**rung for rung in range(_RUNGS)]
        self._returns: dict[int, dict[str, float]] = {step: {} for step in rungs}

    def ends(self, agent: str, step: int, mean_return: float) -> bool:
        """Returns whether the agent is to end; it is compared once at each rung, by its return when
        it is first seen there. NaN: no episode has ended, so it is not compared yet.
        """
        reached = [rung for rung in self._returns if rung <= step]
        if not reached or math.isnan(mean_return) or agent in self._returns[reached[-1]]:
            return False
        rung = self._returns[reached[-1]]
        earlier = list(rung.values())
        rung[agent] = mean_return
        return bool(earlier and mean_return < np.quantile(earlier, 1 - 1 / _FACTOR))


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


class Process(Protocol):
    """The process of an agent, here or on a node of a Ray cluster."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended; `end_by` then waits for its last report."""

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end. May be called again."""

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (by time.monotonic), then kills the process."""


@dataclass
class RunningAgent:
    """An agent whose process was started. Threads of the process note its begin and its end."""

    row: Row
    process: Process = field(init=False)
    has_begun: bool = False  # not while it waits for room on a cluster
    report: Report | None = None
    death: Exception | None = None
    is_ended_early: bool = False
    first_step: int = field(init=False)  # learnt by earlier processes

    def __post_init__(self) -> None:
        self.first_step = self.row.figures.step

    def on_begin(self) -> None:
        """Notes that the agent's program runs."""
        self.has_begun = True

    def on_report(self, report: Report) -> None:
        """Notes the agent's last report."""
        self.report = report

    def on_end(self, error: Exception) -> None:
        """Notes that the process has ended without having been asked to."""
        self.death = error

    def end_early(self) -> None:
        """Asks the agent to end before it is complete, because others do better."""
        self.is_ended_early = True
        self.process.ask_to_end()

    def end_row(self) -> None:
        """Notes the end in the row, once the process has ended."""
        if self.report is not None:
            self.row.end(self.report.get("why"), self.is_ended_early)
        elif self.death is not None:
            self.row.end(str(self.death))
        else:
            has_learnt = self.row.figures.step > self.first_step
            self.row.end("it did not write its checkpoint in time" if has_learnt else None)


def process_here(
    agent: Agent,
    more: Sequence[str],
    environment: Mapping[str, str],
    on_report: Callable[[Report], None],
    on_end: Callable[[Exception], None],
) -> ChildProcess:
    """Starts the process of an agent on this machine.

    more: flags to add to the agent's own. environment: variables of its process.
    """
    return ChildProcess(
        name=agent.name,
        module="torchbeast.sweep.agent_main",
        arguments={"program": agent.program, "words": [*agent.words, *more]},
        on_report=on_report,
        on_end=on_end,
        environment=environment,
    )


def starting_here(
    more: Sequence[str], environment: Mapping[str, str]
) -> Callable[[RunningAgent], Process]:
    """Returns what starts agents on this machine; for the arguments see `process_here`."""

    def start(running: RunningAgent) -> Process:
        running.on_begin()
        agent = running.row.agent
        return process_here(agent, more, environment, running.on_report, running.on_end)

    return start


class Runner:
    """Runs agents. Used by the main thread."""

    def __init__(
        self,
        how: str,
        at_once: int,
        start: Callable[[RunningAgent], Process],
        asha: Asha | None = None,
    ) -> None:
        """how: says how agents run. at_once: agents that are started at the same time, at most."""
        self._how, self._at_once, self._start_process, self._asha = how, at_once, start, asha
        self._running: list[RunningAgent] = []

    def __str__(self) -> str:
        return self._how

    def run(self, rows: Sequence[Row], supervisor: Supervisor, show: Callable[[], None]) -> None:
        """Runs all agents that wait, until they or the sweep have ended; calls `show` often."""
        while not supervisor.ended:
            try:
                self._start(rows)
            except RunError as error:  # the connection to a cluster was lost
                supervisor.fail("sweep", error)
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
        started = [running.row for running in self._running]
        for row in rows:
            if len(self._running) >= self._at_once:
                return
            if row.state != "waiting" or row in started:
                continue
            row.hold(is_in_use(row.agent.folder))
            if not row.is_held:
                running = RunningAgent(row)
                running.process = self._start_process(running)
                self._running.append(running)
                self._note_begin(running)

    def _note_begin(self, running: RunningAgent) -> None:
        if running.has_begun and running.row.state == "waiting":
            running.row.start()

    def _follow(self) -> None:
        for running in list(self._running):
            self._note_begin(running)
            running.row.follow()
            if running.process.has_ended:
                self._running.remove(running)
                running.process.end_by(time.monotonic())
                running.end_row()
            elif self._asha is not None and not running.is_ended_early:
                figures = running.row.figures
                if self._asha.ends(running.row.agent.name, figures.step, figures.mean_return):
                    running.end_early()

    def _stop(self, show: Callable[[], None]) -> None:
        """Lets all agents write a checkpoint and end."""
        begun = [running for running in self._running if running.row.state == "running"]
        for running in self._running:
            if running not in begun:  # first, because an agent that ends makes room for them
                running.process.end_by(time.monotonic())
        for running in begun:
            running.row.stop()
            running.process.ask_to_end()
        show()
        deadline = time.monotonic() + GRACE_S + _END_S
        for running in begun:
            running.process.end_by(deadline)
            running.end_row()
            show()
        self._running.clear()
