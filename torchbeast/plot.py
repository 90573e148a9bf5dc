# SPDX-License-Identifier: Apache-2.0
"""Plots curves of runs: mean episode return, or another column of the log, by steps or minutes.

python -m torchbeast.plot ~/logs/torchbeast/latest --output curve.png curve.svg
python -m torchbeast.plot mono-1 mono-2 mono-3 poly-1 poly-2 poly-3 --clock
python -m torchbeast.plot docs/results/cartpole/*.csv
python -m torchbeast.plot ~/logs/torchbeast/latest --column entropy

Runs that differ only in their seed share a colour: a thin line for each run, which ends with a dot,
and a thick line for their mean. The mean ends with the first run, because a mean over the remaining
runs would jump there. A band is not drawn, because it could show returns that no run ever had.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastLearnerFlags
from torchbeast.cli.ray_flags import RayBeastFlags
from torchbeast.core.base.checks import did_you_mean, names_with
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of, refusing_paths
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import read_meta, run_path, runs_next_to

RETURN = "mean_episode_return"
_SMOOTHED = 20  # updates in the moving average, at most
_EPISODES = 100  # in the moving average of returns; fewer updates suffice if they have as many
_SMOOTHED_KEPT = 5  # rows in the moving average of a kept curve; a row is a mean over updates
_GRID = 500  # points in a line
_LABEL_PARTS = 3
# Colours that colour-blind readers can tell apart (Okabe and Ito 2008), the pale yellow last.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#F0E442"]
NOTE = "Thick: mean of n runs, until the first one ends. Thin: moving averages of single runs."

_SPEAK_FOR_THEMSELVES = ("program", "env", "model")

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class PlotFlags:
    """Plots the mean episode return of runs: a thin line for each run, a thick one for the mean."""

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN [RUN ...]]")
    ]
    """Runs, by the names or folders that they print, or saved curves named PROGRAM-SEED.csv. Runs
    that differ only in their seed are averaged into one line."""
    output: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[IMAGE [IMAGE ...]]")] = ()
    """Image files to write: .png, .svg or .pdf. Default: curve.png in the run's folder, or in the
    folder that contains all runs."""
    clock: bool = False
    """Plot against minutes since the first update instead of env steps."""
    column: str = RETURN
    """Column of the log to plot, such as entropy or grad_norm; fields.csv lists them."""


@dataclass
class RunGroup:
    """Runs with the same settings."""

    settings: dict[str, Any]
    curves: dict[Path, Points] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code_of("plot", lambda: run(parse(PlotFlags, "plot", argv)))


def run(flags: PlotFlags) -> int:
    """Draws a line per group of runs and prints where the images are; returns the exit code.

    Raises UsageError if no run has a curve, or if matplotlib is not installed.
    """
    if not flags.runs:
        raise UsageError("use the folder of a run, such as ~/logs/torchbeast/latest")
    with refusing_paths("use the folder of a run that can be read"):
        groups = group_runs(
            [Path(os.path.realpath(run_path(run))) for run in flags.runs], flags.clock, flags.column
        )
    if not flags.output:
        flags = replace(flags, output=(_folder_of(groups) / "curve.png",))
    _save(list(zip(labels(groups), groups, strict=True)), flags)
    print(f"Plot: {', '.join(map(str, flags.output))}")
    return EXIT_DONE


def _folder_of(groups: Iterable[RunGroup]) -> Path:
    """Returns the folder for the image: the run's own, or the one that has all runs; or the current
    folder if that cannot be written.
    """
    runs = [run if run.is_dir() else run.parent for group in groups for run in group.curves]
    folder = Path(os.path.commonpath(runs))
    return folder if os.access(folder, os.W_OK) else Path()


def group_runs(
    folders: Sequence[Path], clock: bool = False, column: str = RETURN
) -> list[RunGroup]:
    """Groups runs by their settings, in the order given; a run that is given twice counts once.

    Skips runs without a value, with a message. Raises UsageError if no run is left.
    """
    groups: dict[str, RunGroup] = {}
    curves = {folder: curve(folder, clock, column) for folder in folders}
    if not any(curves.values()):
        raise UsageError(_lack(folders[0], column))
    for folder, points in curves.items():
        if not points:
            lack = _lack(folder, column)
            print(f"{lack[:1].upper()}{lack[1:]}: skipping it.", file=sys.stderr)
            continue
        settings = settings_of_run(folder)
        group = groups.setdefault(json.dumps(settings, sort_keys=True), RunGroup(settings))
        group.curves[folder] = points
    return list(groups.values())


def _lack(folder: Path, column: str) -> str:
    """Returns why a run has no point to plot."""
    known = {name for row in read_logs(folder) for name in row}
    if folder.is_file() and not known:
        return f"{folder} is neither the folder of a run nor a saved curve"
    if column == RETURN or column in known:
        return f"no episode has ended in {folder} yet"
    similar = [name for name in sorted(known) if column in name]  # such as mean_episode_length
    hint = f"; did you mean {' or '.join(similar)}" if similar else did_you_mean(column, known)
    hint = hint or "; fields.csv lists the columns"
    return f"{folder} has no values in a column {column}{hint}"


def settings_of_run(folder: Path) -> dict[str, Any]:
    """Returns the settings that distinguish a run: its program and the flags that matter.

    A setting that changed during the run has all its values, as in "0.001, then 0.0003". For a
    folder without meta.json: its path. For a file: its name without the seed, and the settings of
    the run in whose folder it is; a kept curve is in none.
    """
    if folder.is_file():
        name = folder.stem.rpartition("-")[0] or folder.stem
        of_run = settings_of_run(folder.parent) if read_meta(folder.parent) else {}
        return of_run | {"program": name}
    meta = read_meta(folder)
    if not isinstance(meta.get("args"), dict):
        return {"folder": str(folder)}
    parts = [*meta.get("earlier_parts", ()), meta]
    programs = [Path(next(iter(part.get("argv") or ()), "")).stem for part in parts]
    args = meta["args"] | _changed(parts)
    if "replay_service" in args:  # its address does not matter
        args["shared_replay"] = args["replay_service"] is not None
    if args.get("selfplay"):  # each run has a folder of its own
        args["selfplay"] = True
    if args.get("listen"):  # hosts join and leave at any time
        args.pop("num_envs", None)
    records_of = (RayBeastFlags, PolyBeastLearnerFlags)  # which have the flags of all programs
    skipped = names_with("command", *records_of) | names_with("incidental", *records_of)
    return {"program": _in_order(programs)} | {
        name: value for name, value in args.items() if name not in skipped
    }


def _changed(parts: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns the settings that changed during a run, with all their values; but not a larger
    total_steps, by which a run was only extended.
    """
    values: dict[str, list[Any]] = {}
    for part in parts:
        for name, (before, now) in part.get("changed", {}).items():
            if name != "total_steps":
                values.setdefault(name, [before]).append(now)
    return {name: _in_order(of_setting) for name, of_setting in values.items()}


def _in_order(values: Sequence[Any]) -> str:
    """Returns the values of a setting as text: 0.001, then 0.0003. Of many it has the ends."""
    texts = [str(value) for value, _ in itertools.groupby(values)]
    return ", then ".join(texts if len(texts) <= 3 else [texts[0], "...", texts[-1]])


def curve(folder: Path, clock: bool = False, column: str = RETURN) -> Points:
    """Returns points (step, value): a moving average of the returns, other columns as they are.
    With `clock`, minutes since the first row take the place of the step.

    Raises UsageError when `folder` is neither a run's folder nor a kept curve.
    """
    if not folder.exists():
        raise UsageError(f"there is no run at {folder}: {runs_next_to(folder)}")
    if not (folder.is_file() or (folder / "logs.csv").exists()):
        hint = f"; for the runs in it, give {folder}/*" if any(folder.glob("*/logs.csv")) else ""
        raise UsageError(f"{folder} is not the folder of a run: it has no logs.csv{hint}")
    is_kept = folder.is_file()
    recent: deque[tuple[float, float]] = deque(maxlen=_SMOOTHED_KEPT if is_kept else _SMOOTHED)
    points: Points = []
    before = 0.0
    began: float | None = None
    for row in read_logs(folder):
        if began is None:
            began = _began(folder, row)
        if column in row:
            ended = row.get("episodes", before)
            if column != RETURN or "num_episodes" in row:
                recent.clear()  # other columns, and evaluations, are drawn as they are
            recent.append((row[column], ended - before))
            before = ended
            if not is_kept:  # forgets updates, while the others have enough episodes
                while sum(count for _, count in recent) - recent[0][1] >= _EPISODES:
                    recent.popleft()
            x = _minutes(row) - began if clock else row["step"]
            while points and points[-1][0] >= x:  # the run went back
                points.pop()
            games = [1.0 if is_kept else max(1.0, count) for _, count in recent]
            mean = np.average([value for value, _ in recent], weights=games)
            points.append((x, float(mean)))
    return points


def _began(folder: Path, first: dict[str, float]) -> float:
    """Returns the minutes from which a clock counts, also that of a file next to the log."""
    if "_time" not in first:
        return 0.0  # seconds since the start
    logs = folder.parent / "logs.csv"
    return _minutes(next(read_logs(logs.parent), first) if logs.exists() else first)


def _minutes(row: dict[str, float]) -> float:
    return row.get("_time", row.get("seconds", 0.0)) / 60


def on_one_grid(curves: Iterable[Points]) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps [P] and the curves [N, P] at these steps, from where all have begun to where
    one ends; P is 0 if one ends before another begins.
    """
    curves = list(curves)
    first, last = max(points[0][0] for points in curves), min(points[-1][0] for points in curves)
    steps = np.linspace(first, last, _GRID if first <= last else 0)
    return steps, np.array([np.interp(steps, *np.array(points).T) for points in curves])


def labels(groups: list[RunGroup]) -> list[str]:
    """Returns a label per group, with the number of runs: the names that the user has given if each
    is a single run, or else the settings that differ or the name of the program.
    """
    differing = _differing([group.settings for group in groups])
    texts = [_described(group.settings, differing[:_LABEL_PARTS]) for group in groups]
    if all(map(_is_named, groups)) or not all(texts) or len(set(texts)) < len(texts):
        texts = [_name_of(group) for group in groups]
    if len(set(texts)) < len(texts):
        texts = distinct([str(next(iter(group.curves))).removesuffix(".csv") for group in groups])
    return [f"{text} (n={len(group.curves)})" for text, group in zip(texts, groups, strict=True)]


def distinct(paths: Sequence[str | Path]) -> list[str]:
    """Returns the last names of paths, with as many parents as it takes to tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    names: list[str] = []
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(names):
            break
    return names


def _differing(settings: list[dict[str, Any]]) -> list[str]:
    """Returns the names of settings that all groups have and in which they differ.

    Flags of only one program are skipped, because the label names the program.
    """
    common = [name for name in settings[0] if all(name in other for other in settings)]
    differing = [name for name in common if any(s[name] != settings[0][name] for s in settings)]
    return sorted(differing, key=lambda name: name not in _SPEAK_FOR_THEMSELVES)


def _described(settings: dict[str, Any], names: Sequence[str]) -> str:
    """Returns the settings as text; empty for a run without meta.json."""
    values = {name: settings[name] for name in names if name != "folder"}
    entries = (str(v) if k in _SPEAK_FOR_THEMSELVES else f"{k} {v}" for k, v in values.items())
    return ", ".join(entries)


def _is_named(group: RunGroup) -> bool:
    """Returns whether it is a single run, with a name of the user's choice."""
    name, *others = group.curves
    return not others and name.is_dir() and not re.fullmatch(r".+-\d{8}-\d{6}-\w{8}", name.name)


def _name_of(group: RunGroup) -> str:
    name = next(iter(group.curves)).name.removesuffix(".csv")
    return name if len(group.curves) == 1 else str(group.settings.get("program", name))


def draw(
    axes: Any,
    lines: Sequence[tuple[str, RunGroup]],
    title: str,
    clock: bool = False,
    column: str = RETURN,
) -> None:
    """Draws labelled groups of runs into axes of matplotlib."""
    styles = ["-", "--", "-.", ":"]
    cycle = [styles[(line + line // len(COLOURS)) % 4] for line in range(4 * len(COLOURS))]
    axes.set_prop_cycle(color=4 * COLOURS, linestyle=cycle)
    for label, group in lines:
        steps, curves = on_one_grid(group.curves.values())
        (drawn,) = axes.plot(steps, curves.mean(0), label=label)
        thin = {"color": drawn.get_color(), "linestyle": "-", "linewidth": 0.6, "alpha": 0.6}
        for points in group.curves.values():
            axes.plot(*np.array(points).T, marker=".", markevery=[-1], **thin)
    axes.set(title=title, xlabel="minutes" if clock else "environment steps")
    axes.set_ylabel(column.replace("_", " "))
    axes.xaxis.set_major_formatter("{x:,.10g}" if clock else thousands())
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside upper center", fontsize="small")


def _save(lines: Sequence[tuple[str, RunGroup]], flags: PlotFlags) -> None:
    envs = dict.fromkeys(str(group.settings.get("env", "")) for _, group in lines)
    with figure_for(flags.output, (8, 5)) as figure:
        draw(figure.subplots(), lines, ", ".join(filter(None, envs)), flags.clock, flags.column)
        figure.supxlabel(NOTE, fontsize="x-small")


def thousands() -> Any:
    """Returns a formatter of matplotlib: 200k, 1M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


@contextmanager
def figure_for(outputs: Sequence[Path], size: tuple[float, float]) -> Iterator[Any]:
    """Yields a figure of matplotlib, of `size` inches, and writes it to the outputs.

    Raises UsageError if matplotlib is missing, or an output cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plotting needs matplotlib: pip install 'torchbeast[plot]'") from None
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    for output in outputs:
        try:
            figure.savefig(output, dpi=150)
        except (OSError, ValueError) as error:  # no such folder, or not the suffix of an image
            raise UsageError(f"--output {output} cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
