# SPDX-License-Identifier: Apache-2.0
"""Learning curves of runs: mean episode return against environment steps, as a PNG.

python -m torchbeast.plot ~/logs/torchbeast/latest --output curve.png
python -m torchbeast.plot mono-1 mono-2 mono-3 poly-1 poly-2 poly-3
python -m torchbeast.plot docs/results/catch/*.csv

Runs that differ in nothing but their seed are one line, the mean over them, in a band: from the
lowest to the highest, or one standard deviation on each side where there are more than five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from torchbeast.cli.command_line import parse
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of
from torchbeast.reporting.log_files import read_logs

_SMOOTHED = 20  # updates in the mean that is drawn
_SMOOTHED_KEPT = 5  # likewise rows of a kept curve, each of which is a mean over some updates
_GRID = 500  # points of a line
_MANY = 5  # runs, above which the band is a standard deviation: the extremes only ever widen
_LABEL_PARTS = 3

# What says nothing about how a run learns.
_INCIDENTAL = (
    *("seed", "xpid", "savedir", "mode", "num_episodes", "sampled", "random_start", "preset"),
    *("disable_checkpoint", "checkpoint_interval", "write_profiler_trace"),
    *("pipes_basename", "connect_timeout"),
)
_SPEAK_FOR_THEMSELVES = ("program", "env", "model")

Points = list[tuple[float, float]]
Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlotFlags:
    """Draws the mean episode return of runs against their steps, with the spread over seeds."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or kept curves called PROGRAM-SEED.csv. Those that differ in nothing but
    their seed are one line."""
    output: Path = Path("curve.png")
    """The PNG to write."""


@dataclass
class Group:
    """Runs of one kind."""

    settings: Settings
    folders: list[Path] = field(default_factory=list)
    curves: list[Points] = field(default_factory=list)


class Spread(NamedTuple):
    """A group's line and band, each [N]."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; its exit code."""
    return exit_code_of("plot", lambda: run(parse(PlotFlags, "plot", argv)))


def run(flags: PlotFlags) -> int:
    """Draws one line for each kind of run."""
    if not flags.runs:
        raise UsageError("give the folder of a run, such as ~/logs/torchbeast/latest")
    groups = group_runs(list(dict.fromkeys(folder.resolve() for folder in flags.runs)))
    _draw(list(zip(labels(groups), map(spread, groups), strict=True)), flags.output)
    print(f"The curves are in {flags.output}")
    return EXIT_DONE


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """The runs by kind, in the order given. One in which no episode has ended is left out with a
    sentence; UsageError when nothing is left.
    """
    groups: list[Group] = []
    for folder in folders:
        points = curve(folder)
        if not points:
            print(f"No episode has ended in {folder} yet: it is left out.", file=sys.stderr)
            continue
        group = _group_of(settings_of(folder), groups)
        group.folders.append(folder)
        group.curves.append(points)
    if not groups:
        raise UsageError(f"no episode has ended in {folders[0]} yet: there is nothing to plot")
    return groups


def _group_of(settings: Settings, groups: list[Group]) -> Group:
    for group in groups:
        if group.settings == settings:
            return group
    groups.append(Group(settings))
    return groups[-1]


def settings_of(folder: Path) -> Settings:
    """The program and the flags that matter; of a folder without meta.json, its place alone; of a
    kept curve its name without the seed.
    """
    if folder.is_file():
        return {"program": folder.stem.rpartition("-")[0] or folder.stem}
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        args, argv = dict(meta["args"]), meta.get("argv") or [""]
    except (OSError, ValueError, KeyError, TypeError):
        return {"folder": str(folder)}
    return {"program": Path(argv[0]).stem} | {
        name: value for name, value in args.items() if name not in _INCIDENTAL
    }


def curve(folder: Path) -> Points:
    """`(step, mean return of the last updates in which episodes ended)`; UsageError when the
    folder is not a run's.
    """
    if not (folder.is_file() or (folder / "logs.csv").exists()):
        raise UsageError(f"{folder} is no folder of a run: it has no logs.csv")
    points: Points = []
    for step, value in _smoothed(folder):
        while points and points[-1][0] >= step:  # the run went back to an earlier checkpoint
            points.pop()
        points.append((step, value))
    return points


def _smoothed(folder: Path) -> Iterator[tuple[float, float]]:
    smoothed = _SMOOTHED_KEPT if folder.is_file() else _SMOOTHED
    recent: list[float] = []
    for row in read_logs(folder):
        if "mean_episode_return" in row:
            recent = [*recent, row["mean_episode_return"]][-smoothed:]
            yield row["step"], sum(recent) / len(recent)


def spread(group: Group) -> Spread:
    """Mean and band on a common grid of steps.

    Runs begin and end at different steps. Each counts where it has points on both sides; the line
    is drawn where at least half of the runs count.
    """
    grid = _grid(group.curves)
    values = np.stack([_on_grid(points, grid) for points in group.curves])  # [runs, N]
    enough = 2 * np.isfinite(values).sum(0) >= len(values)
    values, grid = values[:, enough], grid[enough]
    mean = np.nanmean(values, 0)
    if len(values) > _MANY:
        deviation = np.nanstd(values, 0)
        return Spread(grid, mean, mean - deviation, mean + deviation)
    return Spread(grid, mean, np.nanmin(values, 0), np.nanmax(values, 0))


def _grid(curves: list[Points]) -> np.ndarray:
    """Steps from the first to the last point of any run; a single run keeps its own."""
    if len(curves) == 1:
        return np.array([step for step, _ in curves[0]])
    first, last = min(c[0][0] for c in curves), max(c[-1][0] for c in curves)
    ends = [step for c in curves for step in (c[0][0], c[-1][0])]  # no run falls between the grid
    return np.unique([*np.linspace(first, last, _GRID), *ends])


def _on_grid(points: Points, grid: np.ndarray) -> np.ndarray:
    """The curve [N], straight between its points; NaN before the first and after the last."""
    steps, values = np.array(points).T
    on_grid: np.ndarray = np.interp(grid, steps, values, left=np.nan, right=np.nan)
    return on_grid


def labels(groups: list[Group]) -> list[str]:
    """What differs between the groups; the folder's name where nothing does or is known."""
    differing = _differing([group.settings for group in groups])
    found = [_describe(group.settings, differing) for group in groups]
    if not all(found) or len(set(found)) < len(found):
        found = [_name_of(group) for group in groups]
    return [_with_count(text, group) for text, group in zip(found, groups, strict=True)]


def _differing(settings: list[Settings]) -> list[str]:
    """Names of flags that all groups have and that differ. What only one program has goes without
    saying where the programs are named.
    """
    common = [name for name in settings[0] if all(name in other for other in settings)]
    differing = [name for name in common if any(s[name] != settings[0][name] for s in settings)]
    return sorted(differing, key=lambda name: name not in _SPEAK_FOR_THEMSELVES)


def _describe(settings: Settings, names: list[str]) -> str:
    return ", ".join(_setting(name, settings[name]) for name in names[:_LABEL_PARTS])


def _setting(name: str, value: Any) -> str:
    if name in _SPEAK_FOR_THEMSELVES:
        return str(value)
    if name == "folder":
        return Path(value).name
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {'default' if value is None else value}"


def _name_of(group: Group) -> str:
    first = group.folders[0]
    name = first.stem if first.is_file() else first.name
    if len(group.folders) == 1:
        return name
    return str(group.settings.get("env") or group.settings.get("program") or name)


def _with_count(text: str, group: Group) -> str:
    return f"{text} ({len(group.folders)} runs)" if len(group.folders) > 1 else text


def _draw(lines: list[tuple[str, Spread]], output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, line in lines:
        (drawn,) = axes.plot(line.steps, line.mean, label=label)
        axes.fill_between(line.steps, line.low, line.high, alpha=0.2, color=drawn.get_color())
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or a suffix that is no image's
        raise UsageError(f"--output {output} cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
