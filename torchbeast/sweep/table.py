# SPDX-License-Identifier: Apache-2.0
"""What the agents of a sweep do: a row for each, in a live table on a terminal, else in lines.

At the end their settings are ranked, as a table, a CSV and a plot.

In the ranking, agents that are done come first, ordered by their mean returns. All others follow,
ordered by the steps that they reached, because their mean returns cannot be compared: an agent that
failed early is never better than an agent that is done.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from torchbeast import plot
from torchbeast.errors import UsageError
from torchbeast.processes.child_process import KILLED
from torchbeast.reporting.display import Panel, Rate, line_of, table_of
from torchbeast.reporting.log_files import read_fields
from torchbeast.reporting.run_folder import write_atomically
from torchbeast.sweep.agents import Agent

_NEEDED = ("_tick", "step", "episodes", "mean_episode_return")


class Figures(NamedTuple):
    """The figures of an agent at one moment."""

    step: int = 0
    episodes: int = 0
    mean_return: float = math.nan  # of the last episodes; NaN: none has ended


class RecentReturns:
    """The mean return of the last episodes, from means over those that ended in a batch."""

    def __init__(self, episodes: int) -> None:
        """Prepares the mean over so many episodes, or somewhat more: batches are not divided."""
        self._wanted = episodes
        self._batches: collections.deque[tuple[float, int]] = collections.deque()
        self._count = 0

    def add(self, mean: float, episodes: int) -> None:
        """Adds the mean over the episodes of a batch."""
        self._batches.append((mean, episodes))
        self._count += episodes
        while self._count - self._batches[0][1] >= self._wanted:
            self._count -= self._batches.popleft()[1]

    def mean(self) -> float:
        """Returns the mean; NaN if no episode has ended."""
        total = sum(mean * episodes for mean, episodes in self._batches)
        return total / self._count if self._count else math.nan


def _cells(line: str) -> list[str]:
    """Returns the cells of a line; [] for one that is damaged, as by a disk that was full."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


class Follower:
    """Reads what an agent appends to logs.csv. Used by one thread.

    A resumed agent drops the rows after its checkpoint and counts on from there; then everything is
    read again.
    """

    def __init__(self, folder: Path, episodes: int) -> None:
        """Prepares reading; folder: of the run, which need not exist; episodes: in the mean."""
        self._folder, self._wanted = folder, episodes
        self._begin()

    def _begin(self) -> None:
        self._offset, self._tick = 0, -1
        self._returns = RecentReturns(self._wanted)
        self._columns: dict[str, int] = {}
        self.figures = Figures()

    def read(self) -> Figures:
        """Reads what is new; returns the newest figures."""
        rows = self._new_rows()
        if rows and self._tick >= 0 and rows[0][0] != str(self._tick + 1):
            self._begin()
            rows = self._new_rows()
        for row in rows:
            self._add(row)
        return self.figures

    def _new_rows(self) -> list[list[str]]:
        """Returns the whole rows after those that were read."""
        try:
            with open(self._folder / "logs.csv", "rb") as file:
                if self._offset > file.seek(0, 2):
                    self._begin()
                file.seek(self._offset)
                data = file.read()
        except OSError:  # there is none yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = map(_cells, whole.decode(errors="replace").splitlines())
        return [row for row in rows if row and not row[0].startswith("#")]

    def _add(self, row: list[str]) -> None:
        """Adds the figures of a row; leaves out one that a killed agent did not complete."""
        if not all(name in self._columns for name in _NEEDED):  # columns are added at the right
            with contextlib.suppress(OSError, ValueError, csv.Error):
                self._columns = {name: i for i, name in enumerate(read_fields(self._folder))}
        cells = {name: row[i] for name, i in self._columns.items() if i < len(row)}
        with contextlib.suppress(KeyError, ValueError):
            tick, step = int(cells["_tick"]), int(cells["step"])
            self._add_figures(step, cells)
            self._tick = tick

    def _add_figures(self, step: int, cells: dict[str, str]) -> None:
        episodes = int(cells.get("episodes") or self.figures.episodes)
        if text := cells.get("mean_episode_return"):
            self._returns.add(float(text), max(1, episodes - self.figures.episodes))
        self.figures = Figures(step, episodes, self._returns.mean())


def is_complete(folder: Path, figures: Figures, total_steps: int) -> bool:
    """Returns whether a run has learnt all of its steps, and has written its last checkpoint."""
    return figures.step >= total_steps and has_ended_well(folder)


def has_ended_well(folder: Path) -> bool:
    """Returns whether a run has written its last checkpoint."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(meta.get("successful"))


State = Literal[
    "waiting", "running", "stopping", "done", "stopped", "stopped by the scheduler", "failed"
]

WIDE = 200  # columns of a table that is not on a terminal
_LINES_EVERY_S = 30.0
_LONGEST_WHY = 60
_AROUND = 7  # lines of a terminal that are not rows
_STYLES = {"running": "bold", "done": "green", "failed": "red"}


class Row:
    """An agent and what it does. Used by the main thread."""

    def __init__(self, agent: Agent) -> None:
        """Reads what an earlier part of the sweep has left of the agent."""
        self.agent = agent
        self._follower = Follower(agent.folder, agent.episodes)
        self._rate = Rate()
        self.figures = self._follower.read()
        self.steps_per_second = math.nan
        complete = is_complete(agent.folder, self.figures, agent.total_steps)
        self.state: State = "done" if complete else "waiting"
        self.why = ""  # it failed, as a whole text
        self.is_held = False  # another process runs in its folder

    def start(self) -> None:
        """Notes that the agent runs."""
        self.state, self.is_held = "running", False

    def hold(self, is_held: bool) -> None:
        """Notes whether the agent waits for another process that runs in its folder."""
        self.is_held = is_held

    def stop(self) -> None:
        """Notes that the agent was asked to stop, before it is complete."""
        self.state = "stopping"

    def follow(self, now: float | None = None) -> None:
        """Reads the newest figures of a running agent."""
        before, self.figures = self.figures, self._follower.read()
        if self.figures.step != before.step or not math.isnan(self.steps_per_second):
            now = time.monotonic() if now is None else now
            self.steps_per_second = self._rate.add(self.figures.step, now)

    def end(self, why: str | None, by_scheduler: bool = False) -> None:
        """Notes that the agent has ended; why: it failed, or None; by_scheduler: it was stopped."""
        self.follow()
        self.is_held = False
        if why is not None:
            self.state, self.why = "failed", why
        elif self.figures.step >= self.agent.total_steps:
            self.state = "done"
        else:
            self.state = "stopped by the scheduler" if by_scheduler else "stopped"

    @property
    def reason(self) -> str:
        """Why the agent failed, in one line: the last one of an error, which names it, or the
        signal that killed a process, whatever that printed at last.
        """
        lines = [line.strip() for line in self.why.splitlines() if line.strip()]
        if lines and KILLED in lines[0]:
            return lines[0].partition(";")[0]
        return next((line for line in reversed(lines) if not _is_hint(line)), "")

    @property
    def cells(self) -> dict[str, str]:
        """The figures as texts; an unknown one is a dash."""
        figures = self.figures
        return {
            "steps": f"{figures.step:,} of {self.agent.total_steps:,}",
            "steps/s": _whole(self.steps_per_second if self.state == "running" else math.nan),
            "episodes": f"{figures.episodes:,}",
            "mean return": number(figures.mean_return),
        }


def _is_hint(line: str) -> bool:
    return line.startswith("More is in ")


def number(value: float) -> str:
    """Formats a return; NaN as a dash."""
    return "-" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _whole(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


class Board(Panel):
    """Displays the rows. Used by the main thread, as a context manager."""

    def __init__(self, title: str, rows: Sequence[Row], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._title, self._rows = title, rows
        self._said = {row.agent.name: said(row) for row in rows}
        self._last = -math.inf

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.show()
        super().__exit__(kind, error, trace)

    def show(self, now: float | None = None) -> None:
        """Updates the display; call it about once a second."""
        if self._draw(self._table(self._console.height - _AROUND)):
            return
        now = time.monotonic() if now is None else now
        is_time = now - self._last >= _LINES_EVERY_S
        self._last = now if is_time else self._last
        for row in self._rows:
            if self._said[row.agent.name] != said(row) or (is_time and row.state == "running"):
                self._said[row.agent.name] = said(row)
                cells = {name: value for name, value in row.cells.items() if value != "-"}
                self._print(f"{row.agent.name}: {said(row)}  {line_of(cells)}")

    def _table(self, room: int) -> Group:
        """Lays out the rows; where they do not fit, only those of agents that run or failed."""
        rows = list(self._rows)
        if len(rows) > room:
            rows = [row for row in rows if row.state in ("running", "failed")][: max(1, room)]
        first = self._rows[0]
        table = table_of(self._title, [*first.agent.settings, *first.cells])
        table.add_column("state", max_width=_LONGEST_WHY)
        for row in rows:
            cells = [*row.agent.settings.values(), *row.cells.values()]
            table.add_row(*map(Text, cells), Text(said(row), style=_STYLES.get(row.state, "")))
        return Group(table, Text(counts(self._rows)))


def said(row: Row) -> str:
    """Returns the state of an agent in words."""
    if row.is_held:
        return "waiting for another process in its folder"
    if row.state == "stopped by the scheduler":
        return f"{row.state} at step {row.figures.step:,}"
    return f"failed: {row.reason}" if row.state == "failed" else row.state


def counts(rows: Sequence[Row]) -> str:
    """Returns how many agents are in each state, as in "2 running, 4 waiting"."""
    found = collections.Counter(row.state for row in rows)
    return ", ".join(f"{count} {state}" for state, count in found.items())


CSV, PNG = "sweep.csv", "sweep.png"
_FIGURES = ("state", "step", "total_steps", "episodes", "mean_return", "why")


class Standing(NamedTuple):
    """How good an agent is; a greater one is better."""

    is_done: bool
    step: int  # that the agent reached; 0 if it is done
    mean_return: float  # -inf: no episode has ended

    def __str__(self) -> str:
        value = number(self.mean_return if math.isfinite(self.mean_return) else math.nan)
        return f"{value} at step {self.step:,}" if self.step else value


def standing(row: Row) -> Standing:
    """Returns how good an agent is."""
    is_done, figures = row.state == "done", row.figures
    value = -math.inf if math.isnan(figures.mean_return) else figures.mean_return
    return Standing(is_done, 0 if is_done else figures.step, value)


@dataclass(frozen=True)
class Ranked:
    """Agents that differ in their seed alone."""

    rows: Sequence[Row]

    @property
    def median(self) -> Standing:
        """The median over all agents, including agents that are not done.

        If two agents are in the middle and cannot be compared, the median is the worse one.
        """
        found = sorted(map(standing, self.rows))
        lower, upper = found[(len(found) - 1) // 2], found[len(found) // 2]
        if lower[:2] != upper[:2]:
            return lower
        return lower._replace(mean_return=(lower.mean_return + upper.mean_return) / 2)


def ranked(rows: Iterable[Row]) -> list[Ranked]:
    """Returns the settings from best to worst, by their medians."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.agent.compared.values()), []).append(row)
    made = [Ranked(group) for group in groups.values()]
    return sorted(made, key=lambda group: group.median, reverse=True)


def table(ranking: Sequence[Ranked]) -> Table:
    """Lays out the ranking."""
    with_seeds = any(len(group.rows) > 1 for group in ranking)
    made = Table(title="Ranking by mean return", title_justify="left")
    made.add_column("", justify="right")
    for key in ranking[0].rows[0].agent.compared:
        made.add_column(key, justify="right")
    names = [
        "median return" if with_seeds else "mean return",
        *(["of seeds"] if with_seeds else []),
    ]
    for name in names:
        made.add_column(name, justify="right")
    made.add_column("agents")
    for place, group in enumerate(ranking, 1):
        seeds = [", ".join(map(_told, sorted(group.rows, key=standing)))] if with_seeds else []
        settings = group.rows[0].agent.compared.values()
        cells = [str(place), *settings, str(group.median), *seeds, counts(group.rows)]
        made.add_row(*map(Text, cells))
    return made


def _told(row: Row) -> str:
    """Returns an agent's mean return in words, with its state unless it is done."""
    return f"{standing(row)}{'' if row.state == 'done' else f' ({row.state})'}"


def report(rows: Sequence[Row], folder: Path) -> None:
    """Prints the ranking and the errors of agents; writes sweep.csv and the plot."""
    ranking = ranked(rows)
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table(ranking))
    if any(row.state != "done" for row in rows):
        print("Agents that are not done come last, ordered by the steps that they reached.")
    for row in rows:
        if row.state == "failed":
            print(f"{row.agent.name} failed: {row.why}", file=sys.stderr)
    write_atomically(folder / CSV, as_csv(ranking).encode())
    print(f"All figures are in {folder / CSV}")
    _plot(rows, folder / PNG)


def as_csv(ranking: Sequence[Ranked]) -> str:
    """Returns a line for each agent, from best to worst."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["rank", "agent", *ranking[0].rows[0].agent.settings, *_FIGURES])
    for place, group in enumerate(ranking, 1):
        for row in group.rows:
            settings = row.agent.settings.values()
            writer.writerow([place, row.agent.name, *settings, *_figures(row)])
    return text.getvalue()


def _figures(row: Row) -> list[str | int | float]:
    figures = row.figures
    mean = "" if math.isnan(figures.mean_return) else figures.mean_return
    return [row.state, figures.step, row.agent.total_steps, figures.episodes, mean, row.reason]


def _plot(rows: Sequence[Row], output: Path) -> None:
    """Plots the agents that have finished episodes, if any, and if matplotlib is installed."""
    plotted = [row for row in rows if not math.isnan(row.figures.mean_return)]
    if not plotted:
        return
    states = {row.agent.folder: row.state for row in plotted if row.state != "done"}
    try:
        plot.plot([row.agent.folder for row in plotted], output, states)
    except UsageError as error:
        print(f"There is no plot: {error}.")
