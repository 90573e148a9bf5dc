# SPDX-License-Identifier: Apache-2.0
"""The result of a sweep: its settings from best to worst, as a table, a CSV and a plot.

Agents that are done come first, ordered by their mean returns. All others follow, ordered by the
steps that they reached, because their mean returns cannot be compared: an agent that failed early
is never better than an agent that is done.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchbeast import plot
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import write_atomically
from torchbeast.sweep.table import WIDE, Row, counts, number

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
