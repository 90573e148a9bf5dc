# SPDX-License-Identifier: Apache-2.0
"""The result of a sweep: its settings from best to worst, as a table, a CSV and a plot."""

from __future__ import annotations

import csv
import io
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchbeast import plot
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import write_atomically
from torchbeast.sweep.table import WIDE, Row, counts, number

CSV, PNG = "sweep.csv", "sweep.png"
_FIGURES = ("state", "step", "total_steps", "episodes", "mean_return", "why")


@dataclass(frozen=True)
class Ranked:
    """Agents that differ in their seed alone."""

    rows: Sequence[Row]

    @property
    def returns(self) -> list[float]:
        """Mean returns of the agents that have finished episodes."""
        found = [row.figures.mean_return for row in self.rows]
        return sorted(value for value in found if not math.isnan(value))

    @property
    def median(self) -> float:
        """Median of the mean returns; NaN if no episode has ended."""
        return statistics.median(self.returns) if self.returns else math.nan


def ranked(rows: Iterable[Row]) -> list[Ranked]:
    """Returns the settings from best to worst; those without any episode come last."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.agent.compared.values()), []).append(row)
    made = [Ranked(group) for group in groups.values()]
    return sorted(made, key=lambda group: -group.median if group.returns else math.inf)


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
        seeds = [", ".join(map(number, group.returns)) or "-"] if with_seeds else []
        settings = group.rows[0].agent.compared.values()
        cells = [str(place), *settings, number(group.median), *seeds, counts(group.rows)]
        made.add_row(*map(Text, cells))
    return made


def report(rows: Sequence[Row], folder: Path) -> None:
    """Prints the ranking and the errors of agents; writes sweep.csv and the plot."""
    ranking = ranked(rows)
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table(ranking))
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
    folders = [row.agent.folder for row in rows if not math.isnan(row.figures.mean_return)]
    if not folders:
        return
    try:
        plot.plot(folders, output)
    except UsageError as error:
        print(f"There is no plot: {error}.")
