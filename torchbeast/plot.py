# SPDX-License-Identifier: Apache-2.0
"""Learning curves of runs: mean episode return against environment steps, as a PNG.

python -m torchbeast.plot ~/logs/torchbeast/latest --output curve.png
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchbeast.runtime.command_line import parse
from torchbeast.runtime.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.runtime.log_files import read_logs

_SMOOTHED = 20  # updates in the mean that is drawn


@dataclass(frozen=True, kw_only=True)
class PlotFlags:
    """Draws the mean episode return of runs against their steps."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    output: Path = Path("curve.png")
    """The PNG to write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; its exit code."""
    return exit_code_of("plot", lambda: run(parse(PlotFlags, "plot", argv)))


def run(flags: PlotFlags) -> int:
    """Draws one curve for each run."""
    if not flags.runs:
        raise UsageError("give the folder of a run, such as ~/logs/torchbeast/latest")
    curves = {folder: curve(folder) for folder in flags.runs}
    _draw(curves, flags.output)
    print(f"The curves are in {flags.output}")
    return EXIT_DONE


def curve(folder: Path) -> list[tuple[float, float]]:
    """`(step, mean return of the last updates in which episodes ended)`;
    UsageError when there is none.
    """
    if not (folder / "logs.csv").exists():
        raise UsageError(f"{folder} is no folder of a run: it has no logs.csv")
    points = list(_smoothed(folder))
    if not points:
        raise UsageError(f"no episode has ended in {folder} yet: there is nothing to plot")
    return points


def _smoothed(folder: Path) -> Iterator[tuple[float, float]]:
    recent: list[float] = []
    for row in read_logs(folder):
        if "mean_episode_return" in row:
            recent = [*recent, row["mean_episode_return"]][-_SMOOTHED:]
            yield row["step"], sum(recent) / len(recent)


def _draw(curves: dict[Path, list[tuple[float, float]]], output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for folder, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=folder.resolve().name)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
