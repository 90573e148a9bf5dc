# SPDX-License-Identifier: Apache-2.0
"""Shows the agents of a sweep: a row for each, in a live table on a terminal, otherwise in lines.

At the end it ranks their settings, as a table, a CSV and a plot.

In the ranking, agents that are done come first, ordered by mean return. All others follow, ordered
by the steps that they reached, because their mean returns cannot be compared. An agent that failed
early is therefore never better than an agent that is done.
"""

from __future__ import annotations

import collections
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from torchbeast import plot
from torchbeast.errors import UsageError
from torchbeast.fleets.child_process import KILLED, ChildReport
from torchbeast.reporting.display import Panel, Rate, figure, line_of, print_table, table_of
from torchbeast.reporting.log_files import LogFollower, csv_line, read_logs
from torchbeast.reporting.run_folder import read_meta, write_atomically
from torchbeast.sweep.agents import AgentRun


def has_ended_well(folder: Path) -> bool:
    """Returns whether a run has written its last checkpoint."""
    return bool(read_meta(folder).get("successful"))


def has_evaluated(folder: Path, step: int) -> bool:
    """Returns whether a run has evaluated its weights at a step."""
    path = folder / "evaluations.csv"
    return path.exists() and any(row["step"] == step for row in read_logs(path))


State = Literal[
    "waiting", "running", "stopping", "done", "stopped", "stopped by the scheduler", "failed"
]

_LINES_EVERY_S = 30.0
_LONGEST_WHY = 60
_AROUND = 7  # lines of the terminal around the rows
_STYLES = {"running": "bold", "done": "green", "failed": "red"}


class AgentRow:
    """An agent and its state. Used by the main thread; any may call `begin` and `on_report`."""

    def __init__(self, agent: AgentRun, after: int = -1) -> None:
        """Reads the state that an earlier part of the sweep left in the agent's folder.

        after: step up to which episodes do not count for the mean return.
        """
        self.agent = agent
        args = read_meta(agent.folder).get("args", {})
        is_logged = args.get("episodes_for_avg", agent.episodes) == agent.episodes
        self._follower = LogFollower(agent.folder, agent.episodes, after, is_logged)
        self._rate = Rate()
        self.progress = self._follower.read()
        self._first_step = self.progress.step  # of earlier processes
        self.steps_per_second = math.nan
        complete = self._is_complete and has_ended_well(agent.folder)
        self.state: State = "done" if complete else "waiting"
        self.report: ChildReport | None = None  # how its process ended
        self.is_held = False  # whether another process uses its folder
        self.is_ended_early = False  # whether the scheduler has asked it to end

    def begin(self) -> None:
        """Notes that the agent's program is running."""
        if self.state == "waiting":
            self.state = "running"

    def on_report(self, report: ChildReport) -> None:
        """Notes how the process has ended. Ignores reports after the agent's own report."""
        self.report = self.report or report

    def follow(self, now: float | None = None) -> None:
        """Reads the newest metrics of a running agent."""
        self.progress = self._follower.read()
        now = time.monotonic() if now is None else now
        self.steps_per_second = self._rate.add(self.progress.step, now)

    def end(self) -> None:
        """Notes that the agent has ended."""
        self.follow()
        if self.report is None and self.progress.step > self._first_step:
            self.report = {"why": "it did not save its checkpoint in time"}
        if self.why:
            self.state = "failed"
        elif self._is_complete:
            self.state = "done"
        else:
            self.state = "stopped by the scheduler" if self.is_ended_early else "stopped"

    @property
    def _is_complete(self) -> bool:
        """Whether it has made all steps, and the evaluation after them if it is to be evaluated."""
        agent, step = self.agent, self.progress.step
        return step >= agent.total_steps and (
            not agent.evaluates or has_evaluated(agent.folder, step)
        )

    @property
    def why(self) -> str:
        """Why the agent failed, as a full text; "" if it did not."""
        return str((self.report or {}).get("why", ""))

    @property
    def reason(self) -> str:
        """Why the agent failed, in one line: the last line of an error, or the signal that killed
        the process.
        """
        lines = [line.strip() for line in self.why.splitlines() if line.strip()]
        if lines and KILLED in lines[0]:
            return lines[0].partition(";")[0]
        errors = (line for line in reversed(lines) if not line.endswith("out.log for details"))
        return next(errors, "")

    @property
    def cells(self) -> dict[str, str]:
        """The metrics as text; unknown ones are a dash."""
        progress = self.progress
        rate = self.steps_per_second if self.state == "running" else math.nan
        return {
            "mean return": number(progress.mean_return),
            "steps": f"{progress.step:,}",
            "steps/s": figure(rate, ",.0f"),
        }


def number(value: float) -> str:
    """Formats a return; NaN as a dash."""
    return figure(value, ".4g" if abs(value) < 1000 else ",.0f")


class Board(Panel):
    """Displays the rows. Used by the main thread, as a context manager."""

    def __init__(self, title: str, rows: Sequence[AgentRow], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._title, self._rows = title, rows
        self._shown = {row.agent.name: in_words(row) for row in rows}
        self._last = -math.inf

    def show(self, now: float | None = None) -> None:
        """Updates the display; call it about once a second."""
        if self._draw(self._table(self._console.height - _AROUND)):
            return
        now = time.monotonic() if now is None else now
        is_time = now - self._last >= _LINES_EVERY_S
        self._last = now if is_time else self._last
        for row in self._rows:
            if self._shown[row.agent.name] != in_words(row) or (is_time and row.state == "running"):
                self._shown[row.agent.name] = in_words(row)
                cells = {name: value for name, value in row.cells.items() if value != "-"}
                self._print(f"{row.agent.name}: {in_words(row)}  {line_of(cells)}")

    def _table(self, room: int) -> Group:
        """Lays out the rows; if they do not fit, only rows of agents that are running or failed."""
        rows = list(self._rows)
        if len(rows) > room:
            rows = [row for row in rows if row.state in ("running", "failed")][: max(1, room)]
        first = self._rows[0]
        table = table_of(self._title, [*first.agent.settings, *first.cells])
        table.add_column("state", max_width=_LONGEST_WHY)
        for row in rows:
            cells = [*row.agent.settings.values(), *row.cells.values()]
            table.add_row(*map(Text, cells), Text(in_words(row), style=_STYLES.get(row.state, "")))
        return Group(table, Text(counts(self._rows)))


def in_words(row: AgentRow) -> str:
    """Returns the state of an agent in words."""
    if row.is_held:
        return "waiting for another process in its folder"
    if row.state == "stopped by the scheduler":
        return f"{row.state} at step {row.progress.step:,}"
    return f"failed: {row.reason}" if row.state == "failed" else row.state


def counts(rows: Sequence[AgentRow]) -> str:
    """Returns how many agents are in each state, such as "2 running, 4 waiting"."""
    numbers = collections.Counter(row.state for row in rows)
    return ", ".join(f"{count} {state}" for state, count in numbers.items())


CSV, PNG = "sweep.csv", "sweep.png"
_FIGURES = ("state", "step", "total_steps", "episodes", "mean_return", "why")


class Standing(NamedTuple):
    """The rank of an agent; greater is better."""

    is_done: bool
    step: int  # last step of the agent; 0 if it is done
    mean_return: float  # -inf if no episode has ended

    def __str__(self) -> str:
        value = number(self.mean_return if math.isfinite(self.mean_return) else math.nan)
        return f"{value} at step {self.step:,}" if self.step else value


def standing(row: AgentRow) -> Standing:
    """Returns the rank of an agent."""
    is_done, progress = row.state == "done", row.progress
    value = -math.inf if math.isnan(progress.mean_return) else progress.mean_return
    return Standing(is_done, 0 if is_done else progress.step, value)


Ranked = Sequence[AgentRow]
"""Agents that differ only in their seed."""


def median(group: Ranked) -> Standing:
    """Returns the median over all agents, including agents that are not done. If two are in the
    middle, it is the worse one.
    """
    return statistics.median_low(map(standing, group))


def ranked(rows: Iterable[AgentRow]) -> list[Ranked]:
    """Returns the settings from best to worst, by their medians."""
    groups: dict[tuple[str, ...], list[AgentRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.agent.compared.values()), []).append(row)
    return sorted(groups.values(), key=median, reverse=True)


def table(ranking: Sequence[Ranked]) -> Table:
    """Lays out the ranking."""
    compared = ranking[0][0].agent.compared
    names = ["", *compared, "median return", "returns"]
    laid_out = table_of("Ranking by the median of the mean returns", names)
    laid_out.add_column("runs")
    for place, group in enumerate(ranking, 1):
        seeds = ", ".join(
            f"{standing(row)}{'' if row.state == 'done' else f' ({row.state})'}"
            for row in sorted(group, key=standing)
        )
        settings = group[0].agent.compared.values()
        cells = [str(place), *settings, str(median(group)), seeds, counts(group)]
        laid_out.add_row(*map(Text, cells))
    return laid_out


def report(rows: Sequence[AgentRow], folder: Path) -> None:
    """Prints the ranking; writes sweep.csv and the plot."""
    ranking = ranked(rows)
    print_table(table(ranking))
    if any(row.state != "done" for row in rows):
        print("Unfinished agents are ranked last, by steps.")
    write_atomically(folder / CSV, as_csv(ranking).encode())
    print(f"Results: {folder / CSV}")
    _plot(rows, folder / PNG)


def print_errors(rows: Sequence[AgentRow]) -> None:
    """Prints why agents failed."""
    for row in rows:
        if row.state == "failed":
            print(f"{row.agent.name} failed: {row.why}", file=sys.stderr)


def as_csv(ranking: Sequence[Ranked]) -> str:
    """Returns a line for each agent, from best to worst."""
    lines = [csv_line(["rank", "agent", *ranking[0][0].agent.settings, *_FIGURES])]
    for place, group in enumerate(ranking, 1):
        for row in group:
            settings = row.agent.settings.values()
            lines.append(csv_line([place, row.agent.name, *settings, *_progress_cells(row)]))
    return "".join(lines)


def _progress_cells(row: AgentRow) -> list[str | int | float]:
    progress = row.progress
    mean = "" if math.isnan(progress.mean_return) else progress.mean_return
    return [row.state, progress.step, row.agent.total_steps, progress.episodes, mean, row.reason]


def _plot(rows: Sequence[AgentRow], output: Path) -> None:
    """Plots the agents that have finished episodes, if any, and if matplotlib is installed."""
    folders = [row.agent.folder for row in rows if not math.isnan(row.progress.mean_return)]
    if not folders:
        return
    try:
        plot.run(plot.PlotFlags(runs=tuple(folders), output=(output,)))
    except UsageError as error:
        print(f"No plot: {error}.")
