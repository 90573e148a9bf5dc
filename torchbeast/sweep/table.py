# SPDX-License-Identifier: Apache-2.0
"""What the agents of a sweep do: a row for each, in a live table on a terminal, else in lines."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Group
from rich.text import Text

from torchbeast.processes.child_process import KILLED
from torchbeast.reporting.display import Panel, Rate, line_of, table_of
from torchbeast.sweep.following import Follower, is_complete
from torchbeast.sweep.settings import Agent

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
