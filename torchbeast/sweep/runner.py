# SPDX-License-Identifier: Apache-2.0
"""Runs the agents of a sweep, some at a time, and decides which end early.

    Runner --- start ---> ChildProcess, or ProcessOnRay ---> agent_main.py: the agent's program
                                                                 v
                                       logs.csv, meta.json, model.tar in the agent's folder

An agent ends with the sweep, for whatever reason, because its standard input is then closed. It
leads a separate session, so that Ctrl-C only reaches the sweep, which lets each agent write a
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from torchbeast.errors import RunError
from torchbeast.fleets.child_process import ChildProcess, SendReport
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import available_cores, environment_of_share
from torchbeast.fleets.waiting import running_time
from torchbeast.reporting.run_folder import is_in_use
from torchbeast.sweep.agent_main import GRACE_S
from torchbeast.sweep.agents import AgentRun
from torchbeast.sweep.table import AgentRow

_FACTOR, _RUNGS = 3, 3  # the top third continues at 1/27, 1/9 and 1/3 of the steps


class Asha:
    """ASHA: compares each agent at certain steps, the rungs, with agents that got there before."""

    def __init__(self, total_steps: int) -> None:
        """total_steps: of the agents; if they differ, the smallest number."""
        first = max(1, total_steps // _FACTOR**_RUNGS)
        rungs = [first * _FACTOR**rung for rung in range(_RUNGS)]
        self._returns: dict[int, dict[str, float]] = {step: {} for step in rungs}

    def ends(self, agent: str, step: int, mean_return: float) -> bool:
        """Returns whether to end the agent. It is compared once per rung, by its return when it is
        first seen there. NaN: no episode has ended, so it is not compared yet.
        """
        reached = [rung for rung in self._returns if rung <= step]
        if not reached or math.isnan(mean_return) or agent in self._returns[reached[-1]]:
            return False
        rung = self._returns[reached[-1]]
        earlier = list(rung.values())
        rung[agent] = mean_return
        return bool(earlier and mean_return < np.quantile(earlier, 1 - 1 / _FACTOR))


_EVERY_S = 1.0
_END_S = 10.0  # in addition to the agents' time limit


class Process(Protocol):
    """The process of an agent, here or on a node of a Ray cluster."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. Call `end_by` to wait for its last report."""

    def ask_to_end(self) -> None:
        """Lets the agent write a checkpoint and end. May be called again."""

    def end_by(self, deadline: float) -> None:
        """Waits until `deadline` (of running_time), then kills the process."""


def process_here(
    agent: AgentRun, more: Sequence[str], environment: Mapping[str, str], on_report: SendReport
) -> ChildProcess:
    """Starts the process of an agent on this machine.

    more: additional flags for the agent. environment: variables of its process. on_report: called
    with a report of how it ended, possibly twice.
    """
    return ChildProcess(
        name=agent.name,
        module="torchbeast.sweep.agent_main",
        arguments={"program": agent.program, "words": [*agent.words, *more]},
        on_report=on_report,
        on_end=lambda error: on_report({"why": str(error)}),
        environment=environment,
    )


def runner_here(
    agents: int, parallel: int | None, more: Sequence[str] = (), asha: Asha | None = None
) -> Runner:
    """Returns a runner for this number of agents on this machine, among which it divides the cores.

    parallel: agents at a time; None: one per core. more: additional flags for every agent.
    """
    cores = available_cores()
    at_once = min(agents, parallel or cores)
    share = max(1, cores // at_once)

    def start(row: AgentRow) -> Process:
        process = process_here(row.agent, more, environment_of_share(share), row.on_report)
        row.begin()
        return process

    how = f"{at_once} at a time, {share} core{'s' if share > 1 else ''} each"
    return Runner(how, at_once, start, asha)


class Runner:
    """Runs agents. Used by the main thread."""

    def __init__(
        self, how: str, at_once: int, start: Callable[[AgentRow], Process], asha: Asha | None = None
    ) -> None:
        """how: describes how agents run. at_once: largest number of agents at a time. start: starts
        the process of an agent, possibly later.
        """
        self.how, self._at_once, self._start_process, self._asha = how, at_once, start, asha
        self._running: list[tuple[AgentRow, Process]] = []

    def run(
        self, rows: Sequence[AgentRow], supervisor: Supervisor, show: Callable[[], None]
    ) -> None:
        """Runs all waiting agents until they have ended or the sweep ends; often calls `show`."""
        while not supervisor.ended:
            try:
                self._start(rows)
            except (OSError, RunError) as error:  # no more processes, or a cluster was lost
                supervisor.fail("sweep", error)
            if not self._running and not any(row.state == "waiting" for row in rows):
                break
            supervisor.wait(_EVERY_S)
            self._follow()
            show()
        self._stop(show)

    def _start(self, rows: Sequence[AgentRow]) -> None:
        """Starts waiting agents while there is room.

        An agent of an earlier, killed part of the sweep may still be writing its checkpoint.
        """
        started = [row for row, _ in self._running]
        for row in rows:
            if len(self._running) >= self._at_once:
                return
            if row.state != "waiting" or row in started:
                continue
            row.is_held = is_in_use(row.agent.folder)
            if not row.is_held:
                self._running.append((row, self._start_process(row)))

    def _follow(self) -> None:
        for row, process in list(self._running):
            row.follow()
            if process.has_ended:
                self._running.remove((row, process))
                process.end_by(running_time())
                row.end()
            elif self._asha is not None and not row.is_ended_early:
                row.is_ended_early = self._asha.ends(
                    row.agent.name, row.progress.step, row.progress.mean_return
                )
                if row.is_ended_early:
                    process.ask_to_end()

    def _stop(self, show: Callable[[], None]) -> None:
        """Lets all agents write a checkpoint and end."""
        begun = [(row, process) for row, process in self._running if row.state == "running"]
        for row, process in self._running:
            if (row, process) not in begun:  # first, because ending agents make room for them
                process.end_by(running_time())
        for row, process in begun:
            row.state = "stopping"
            process.ask_to_end()
        show()
        deadline = running_time() + GRACE_S + _END_S
        for row, process in begun:
            process.end_by(deadline)
            row.end()
            show()
        self._running.clear()
