# SPDX-License-Identifier: Apache-2.0
"""Plots learning curves of runs: mean episode return against env steps, as a PNG.

python -m torchbeast.plot ~/logs/torchbeast/latest --output curve.png
python -m torchbeast.plot mono-1 mono-2 mono-3 poly-1 poly-2 poly-3
python -m torchbeast.plot docs/results/catch/*.csv

Runs that differ only in their seed form one thick line, their mean, and a thin one each. The mean
ends with the first run, because a mean over the remaining runs would jump there.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from torchbeast.cli.command_line import parse
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of, refusing_paths
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import OF_ONE_COMMAND

_SMOOTHED = 20  # updates in the moving average
_SMOOTHED_KEPT = 5  # rows in that of a kept curve, each of which is a mean over some updates
_GRID = 500  # points in a line
_LABEL_PARTS = 3

# Flags that do not influence learning.
_INCIDENTAL = (
    *OF_ONE_COMMAND,
    *("seed", "pipes_basename", "connect_timeout"),
    *("disable_checkpoint", "checkpoint_interval", "keep_checkpoints", "write_profiler_trace"),
)
_SPEAK_FOR_THEMSELVES = ("program", "env", "model")

Points = list[tuple[float, float]]
Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlotFlags:
    """Plots the mean episode return of runs against env steps, with the spread over seeds."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or curves in files named PROGRAM-SEED.csv. Runs that differ only in their
    seed are drawn as one line."""
    output: Path = Path("curve.png")
    """PNG file to write."""


@dataclass
class RunGroup:
    """Runs with the same settings."""

    settings: Settings
    folders: list[Path] = field(default_factory=list)
    curves: list[Points] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; its exit code."""
    return exit_code_of("plot", lambda: run(parse(PlotFlags, "plot", argv)))


def run(flags: PlotFlags) -> int:
    """Draws one line per group of runs; returns the exit code."""
    if not flags.runs:
        raise UsageError("give the folder of a run, such as ~/logs/torchbeast/latest")
    folders = [Path(os.path.realpath(folder)) for folder in flags.runs]  # behind `latest`
    plot(list(dict.fromkeys(folders)), flags.output)
    return EXIT_DONE


def plot(folders: Sequence[Path], output: Path) -> None:
    """Draws the curves of runs into a PNG, and prints where it is; raises UsageError without any
    curve, or without matplotlib.
    """
    with refusing_paths("give the folder of a run that can be read"):
        groups = group_runs(folders)
    _draw(list(zip(labels(groups), groups, strict=True)), output)
    print(f"The curves are in {output}")


def group_runs(folders: Sequence[Path]) -> list[RunGroup]:
    """Groups runs by their settings, in the order given.

    Runs in which no episode has ended are reported and left out. Raises UsageError when none
    remains.
    """
    groups: dict[str, RunGroup] = {}
    for folder in folders:
        points = curve(folder)
        if not points:
            print(f"No episode has ended in {folder} yet: it is left out.", file=sys.stderr)
            continue
        settings = settings_of(folder)
        group = groups.setdefault(json.dumps(settings, sort_keys=True), RunGroup(settings))
        group.folders.append(folder)
        group.curves.append(points)
    if not groups:
        raise UsageError(f"no episode has ended in {folders[0]} yet: there is nothing to plot")
    return list(groups.values())


def settings_of(folder: Path) -> Settings:
    """Returns the settings that distinguish a run: its program and the flags that matter.

    For a folder without meta.json it is the path, for a kept curve the file name without the seed.
    """
    if folder.is_file():
        return {"program": folder.stem.rpartition("-")[0] or folder.stem}
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        args, argv = dict(meta["args"]), meta.get("argv") or [""]
    except (OSError, ValueError, KeyError, TypeError):
        return {"folder": str(folder)}
    if "replay_service" in args:  # whether there was one matters, its address does not
        args["shared_replay"] = args["replay_service"] is not None
    return {"program": Path(argv[0]).stem} | {
        name: value for name, value in args.items() if name not in _INCIDENTAL
    }


def curve(folder: Path) -> Points:
    """Returns points (step, moving average of the mean episode return).

    Raises UsageError when `folder` is neither a run's folder nor a kept curve.
    """
    if not (folder.is_file() or (folder / "logs.csv").exists()):
        raise UsageError(f"{folder} is not the folder of a run: it has no logs.csv")
    recent: deque[float] = deque(maxlen=_SMOOTHED_KEPT if folder.is_file() else _SMOOTHED)
    points: Points = []
    for row in read_logs(folder):
        if "mean_episode_return" in row:
            recent.append(row["mean_episode_return"])
            points.append((row["step"], statistics.fmean(recent)))
    return points


def mean(group: RunGroup) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps [N] and mean [N] of a group's curves, from where all have begun to where one
    ends; N is 0 if one ends before another begins. A single run keeps its own steps.
    """
    curves = group.curves
    steps = np.array([step for step, _ in curves[0]])
    if len(curves) > 1:
        first, last = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
        steps = np.linspace(first, last, _GRID if first <= last else 0)
    return steps, np.mean([np.interp(steps, *np.array(points).T) for points in curves], 0)


def labels(groups: list[RunGroup]) -> list[str]:
    """Returns a label per group: the settings that differ, or else the folder's name; then the
    number of runs.
    """
    differing = _differing([group.settings for group in groups])
    found = [_described(group.settings, differing[:_LABEL_PARTS]) for group in groups]
    if not all(found) or len(set(found)) < len(found):
        found = [_name_of(group) for group in groups]
    counts = [len(group.folders) for group in groups]
    return [
        f"{text} ({count} runs)" if count > 1 else text
        for text, count in zip(found, counts, strict=True)
    ]


def _differing(settings: list[Settings]) -> list[str]:
    """Returns the flags that differ, of those that all groups have.

    Flags of one program only are left out: the label names the program.
    """
    common = [name for name in settings[0] if all(name in other for other in settings)]
    differing = [name for name in common if any(s[name] != settings[0][name] for s in settings)]
    return sorted(differing, key=lambda name: name not in _SPEAK_FOR_THEMSELVES)


def _described(settings: Settings, names: Sequence[str]) -> str:
    """Returns the settings as text; empty for a run without meta.json."""
    values = {name: settings[name] for name in names if name != "folder"}
    each = (str(v) if k in _SPEAK_FOR_THEMSELVES else f"{k} {v}" for k, v in values.items())
    return ", ".join(each)


def _name_of(group: RunGroup) -> str:
    first = group.folders[0]
    name = first.stem if first.is_file() else first.name
    if len(group.folders) == 1:
        return name
    return str(group.settings.get("env") or group.settings.get("program") or name)


def _draw(lines: list[tuple[str, RunGroup]], output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install 'torchbeast[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, group in lines:
        (drawn,) = axes.plot(*mean(group), label=label)
        for points in group.curves:
            axes.plot(*np.array(points).T, color=drawn.get_color(), linewidth=0.5, alpha=0.5)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean episode return")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:  # no such folder, or not the suffix of an image
        raise UsageError(f"--output {output} cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
