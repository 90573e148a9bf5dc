# SPDX-License-Identifier: Apache-2.0
"""Compares runs of two settings, task by task and on all tasks together, with intervals.

python -m torchbeast.compare ~/logs/torchbeast/minatar-pqn ~/logs/torchbeast/minatar-impala
python -m torchbeast.compare 'lr/learning_rate=0.003*' 'lr/learning_rate=0.0003*' --output lr.png

A run's score is the mean return of its last 100 episodes, a task is an environment, and runs of a
setting differ only in their seed. See docs/how-to/suite.md.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.text import Text

from torchbeast import plot
from torchbeast.cli.command_line import flag_names, parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.base.checks import counted, names_with
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of, expanded, refusing_paths
from torchbeast.reporting import estimates
from torchbeast.reporting.display import print_table, table_of
from torchbeast.reporting.estimates import Estimate, estimate
from torchbeast.reporting.log_files import LogFollower, read_logs
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.reporting.run_folder import run_path, write_atomically
from torchbeast.run.config import HardwareConfig

EPISODES = 100
_FEW = 5  # runs of a task; intervals from fewer are too narrow
_SAME_LENGTH = 1.05  # of the shortest run
_RESAMPLES = 500  # for each point of a line
NOTE = "Lines: interquartile mean of n runs. Bands: 95 % intervals."


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Compares the runs of two settings, or describes the runs of one, with 95 % intervals."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")]
    """One or two sets of runs, each the folder of a suite, of a sweep or of one run, or a pattern
    in quotes, such as 'sweep/learning_rate=0.003*'."""
    output: tuple[Path, ...] = ()
    """Files to write: curves and performance profiles as .png, .svg or .pdf, all numbers as
    .json."""


class ScoredRun(NamedTuple):
    """A run of a task; step: its last one, column: of its returns in the log."""

    folder: Path
    score: float
    step: int
    column: str


class Runs(NamedTuple):
    """Runs that differ only in their environment and seed, by the task; name: tells the set
    from the other one.
    """

    name: str
    tasks: Mapping[str, Sequence[ScoredRun]]

    def folders(self) -> set[Path]:
        """Returns the folders of all runs."""
        return {run.folder for runs in self.tasks.values() for run in runs}

    def scores(self, task: str) -> np.ndarray:
        """Returns the scores [N] of the runs of a task."""
        return np.array([run.score for run in self.tasks[task]])


class Comparison(NamedTuple):
    """Statistics of a task, or of all tasks together.

    Attributes:
        iqm: Interquartile mean of each set of runs.
        difference: Of the two interquartile means; None for one set.
        improvement: Probability that a run of the first set scores higher; None for one set.
    """

    iqm: list[Estimate]
    difference: Estimate | None
    improvement: Estimate | None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    return exit_code_of("compare", lambda: run(parse(CompareFlags, "compare", argv)))


def run(flags: CompareFlags) -> int:
    """Prints the comparison and writes the files; raises UsageError."""
    if len(flags.runs) not in (1, 2):
        raise UsageError(f"expected one or two sets of runs, got {len(flags.runs)}")
    with refusing_paths("use folders that can be read"):
        sets = [*map(read, flags.runs, _names(flags.runs))]
    if len(sets) == 2 and (both := sets[0].folders() & sets[1].folders()):
        raise UsageError(f"{min(both)} is in both sets: use sets without common runs")
    tasks = [task for task in sets[0].tasks if all(task in runs.tasks for runs in sets)]
    if not tasks:
        raise UsageError(
            f"{sets[0].name} and {sets[1].name} have no environment in common: "
            f"{', '.join(sets[0].tasks)} and {', '.join(sets[1].tasks)}"
        )
    comparisons = {task: compared([[runs.scores(task)] for runs in sets]) for task in tasks}
    together = None
    if len(sets) == 2:
        together = compared([_on_one_scale(runs, sets, tasks) for runs in sets])
    _print(sets, comparisons, together)
    for path in flags.output:
        _write(path, sets, comparisons, together)
    return EXIT_DONE


def _names(patterns: Sequence[str]) -> list[str]:
    """Returns a name for each set; raises UsageError if the sets are the same."""
    for ending in ("*,", ""):  # without it if the names differ in nothing else
        names = plot.distinct([expanded(pattern.rstrip(ending) or pattern) for pattern in patterns])
        if len(set(names)) == len(names):
            return names
    raise UsageError(f"both sets are {patterns[0]}: use two different sets")


def read(pattern: str, name: str = "") -> Runs:
    """Reads the runs of a folder or pattern, under a name.

    Raises UsageError if it is empty, if no episode has ended, or if runs of one environment differ
    in a setting.
    """
    differing = names_with("task", MonoBeastFlags) | {"folder"}  # between tasks
    may_change = (DisplayConfig, HardwareConfig)  # as a sweep that continues may
    differing |= {name for config in may_change for name in flag_names(config)}
    folders = _folders(pattern)
    if not folders:
        raise UsageError(f"no run found in {pattern}: use the folder of a run or of several runs")
    runs_by_task: dict[str, list[ScoredRun]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for folder in folders:
        of_run = plot.settings_of_run(folder)
        is_logged = of_run.get("episodes_for_avg", EPISODES) == EPISODES
        progress = LogFollower(folder, EPISODES, is_logged=is_logged).read()
        if math.isnan(progress.mean_return):
            print(f"Skipping {folder}: no episode has ended yet.", file=sys.stderr)
            continue
        scores = _scores(of_run, folder, progress.mean_return)
        of_run = {name: value for name, value in of_run.items() if name not in differing}
        for task, (column, score) in scores.items():
            _check_same(settings.setdefault(task, of_run), of_run, folder)
            run = ScoredRun(folder, score, progress.step, column)
            runs_by_task.setdefault(task, []).append(run)
    if not runs_by_task:
        raise UsageError(f"no episode has ended in {pattern} yet")
    return Runs(name, runs_by_task)


def _folders(pattern: str) -> list[Path]:
    """Returns the folders of runs that a pattern matches or contains, each once."""
    whole = expanded(pattern)  # the name of a folder may have brackets
    paths = sorted(map(run_path, [whole] if whole.exists() else glob.glob(str(whole))))
    logs = [log for path in paths for log in (path / "logs.csv", *sorted(path.glob("*/logs.csv")))]
    runs = [Path(os.path.realpath(log.parent)) for log in logs if log.exists()]
    return list(dict.fromkeys(runs))


def _task(settings: Mapping[str, Any]) -> str:
    kwargs = settings.get("env_kwargs")
    return f"{settings.get('env', '?')}{' ' + json.dumps(kwargs) if kwargs else ''}"


def _scores(
    settings: Mapping[str, Any], folder: Path, mean_return: float
) -> dict[str, tuple[str, float]]:
    """Returns the column of each task's returns, and the last one, so that an agent of many tasks
    is compared with agents of one.
    """
    names = [name.strip() for name in str(settings.get("env", "")).split(",")]
    last: dict[str, float] = {}
    for row in read_logs(folder) if len(names) > 1 else ():
        last = row
    columns = {_task({**settings, "env": name}): f"mean_return_{name}" for name in names}
    known = {task: (column, last[column]) for task, column in columns.items() if column in last}
    # otherwise one task, perhaps with a comma in its name
    return known or {_task(settings): (plot.RETURN, mean_return)}


def _check_same(first: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    for name, value in now.items():
        if first.get(name, value) != value:
            raise UsageError(
                f"runs of a set may differ only in their environment and seed, but {folder} has "
                f"{name} {value}, and another run {first[name]}: choose runs by a pattern in "
                "quotes, such as 'lr/learning_rate=0.001,*' for a sweep. The members of a "
                "population change their settings and cannot be compared"
            )


def compared(sets: Sequence[Sequence[np.ndarray]]) -> Comparison:
    """Returns the statistics of one set or two sets of runs; each has the scores of every task."""
    rng = np.random.default_rng(0)  # the same runs give the same intervals
    drawn = [estimates.resampled(tasks, rng) for tasks in sets]
    means, means_drawn = [*map(estimates.iqm, sets)], [*map(estimates.iqm, drawn)]
    iqm = [*map(estimate, means, means_drawn, sets)]
    if len(sets) == 1:
        return Comparison(iqm, None, None)
    both = [*sets[0], *sets[1]]
    difference = estimate(means[0] - means[1], means_drawn[0] - means_drawn[1], both)
    better = estimates.probability_of_improvement
    return Comparison(iqm, difference, estimate(better(*sets), better(*drawn), both))


def _on_one_scale(runs: Runs, sets: Sequence[Runs], tasks: Sequence[str]) -> list[np.ndarray]:
    """Returns scores of each task as shares of the range of all runs of the task."""
    scaled = []
    for task in tasks:
        every = np.concatenate([other.scores(task) for other in sets])
        low, high = every.min(), every.max()
        scaled.append((runs.scores(task) - low) / (high - low if high > low else 1.0))
    return scaled


def verdict(improvement: Estimate, runs: int) -> str:
    """Returns what the runs say about which of the sets A and B is better.

    runs: the smallest number of runs of a task.
    """
    value, low, high = improvement
    better, worse, chance = ("A", "B", value) if value > 0.5 else ("B", "A", 1 - value)
    beats = f"one of its runs beats one of {worse} with probability {chance:.2f}"
    if low > 0.5 or high < 0.5:
        if runs >= _FEW:
            return f"{better} is better: {beats}."
        few = f"{counted(runs, 'run')} per task {'is' if runs == 1 else 'are'} not enough"
        return f"Inconclusive: {few}. Train with at least {_FEW} seeds."
    # Intervals shrink with the root of the runs. The end beyond 0.5 has to come back to it.
    wider = (value - low if value > 0.5 else high - value) / max(abs(value - 0.5), 1e-9)
    needed = max(_FEW, math.ceil(runs * wider**2), runs + 1) - runs
    more = f"about {counted(needed, 'more seed')}" if needed <= 100 else "more than 100 more seeds"
    return (
        "Inconclusive: the interval of P(A > B) contains 0.5. "
        f"If the difference is as large as it looks, {more} of each would show it."
    )


def _print(
    sets: Sequence[Runs], comparisons: Mapping[str, Comparison], together: Comparison | None
) -> None:
    names = "AB"[: len(sets)]
    for letter, runs in zip(names, sets, strict=True):
        print(f"{letter}: {runs.name}")
    columns = ["runs", *names, *(["A - B", "P(A > B)"] if together else [])]
    print("Interquartile means of the scores, with 95 % intervals:")
    table = table_of("", ["", *columns])
    for task, of_task in comparisons.items():
        counts = " and ".join(str(len(runs.tasks[task])) for runs in sets)
        table.add_row(*map(Text, (task, counts, *_cells(of_task))))  # a str may be markup
    if together is not None:
        table.add_row("all (normalised)", "", *_cells(together))
    print_table(table)
    fewest = min(len(runs.tasks[task]) for runs in sets for task in comparisons)
    if together is not None and together.improvement is not None:
        every = [{score for runs in sets for score in runs.scores(task)} for task in comparisons]
        if fewest >= _FEW and all(len(scores) == 1 for scores in every):
            print("No difference: all runs of a task have the same score.")
        else:
            print(verdict(together.improvement, fewest))
    elif fewest < _FEW:
        print(f"Intervals are too narrow with fewer than {_FEW} runs per task.")
    for task in comparisons:
        ends = [run.step for runs in sets for run in runs.tasks[task]]
        if max(ends) > _SAME_LENGTH * min(ends):
            print(
                f"Runs of {task} end between step {min(ends):,} and {max(ends):,}: wait until all "
                "have ended, or compare runs of one length."
            )
    for letter, runs in zip(names, sets, strict=True):
        if missing := [task for task in runs.tasks if task not in comparisons]:
            print(f"Only {letter} has {', '.join(missing)}.")


def _cells(of_task: Comparison) -> list[str]:
    means = [(mean, ".4g") for mean in of_task.iqm]
    of_two = [(of_task.difference, "+.3g"), (of_task.improvement, ".2f")]
    return [_with_interval(each, form) for each, form in [*means, *of_two] if each is not None]


def _with_interval(statistic: Estimate, form: str) -> str:
    value, low, high = (_number(number, form) for number in statistic)
    return f"{value} [{low}, {high}]"


def _number(number: float, form: str) -> str:
    """Formats a number; from 1,000 on without an exponent."""
    sign = "+" if form.startswith("+") else ""
    return format(number, form if abs(number) < 999.5 else f"{sign},.0f")


def _write(
    path: Path, sets: Sequence[Runs], tasks: Mapping[str, Comparison], together: Comparison | None
) -> None:
    if path.suffix != ".json":
        _draw(path, sets, list(tasks))
        return
    contents = {
        "sets": {
            runs.name: {task: runs.scores(task).tolist() for task in runs.tasks} for runs in sets
        },
        "tasks": {task: _as_json(of_task) for task, of_task in tasks.items()},
        "together": None if together is None else _as_json(together),
    }
    with refusing_paths("use another --output"):
        write_atomically(path, json.dumps(contents, indent=1).encode())


def _as_json(of_task: Comparison) -> dict[str, Any]:
    return {
        name: value._asdict() if isinstance(value, Estimate) else [mean._asdict() for mean in value]
        for name, value in of_task._asdict().items()
        if value is not None
    }


def _draw(path: Path, sets: Sequence[Runs], tasks: Sequence[str]) -> None:
    """Draws the learning curves of each task and, for two sets, the performance profiles."""
    panels = len(tasks) + (len(sets) == 2)
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    with plot.figure_for([path], (4.5 * columns, 3.5 * rows)) as figure:
        figure.supxlabel(NOTE, fontsize="x-small")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for task, here in zip(tasks, axes, strict=False):
            for runs, colour in zip(sets, plot.COLOURS, strict=False):
                curves = [plot.curve(run.folder, column=run.column) for run in runs.tasks[task]]
                draw_curve(here, curves, f"{runs.name} (n={len(curves)})", colour)
            here.set(title=task, xlabel="environment steps", ylabel="mean episode return")
        if len(sets) == 2:
            _draw_profiles(axes[len(tasks)], sets, tasks)
        for here in axes[:panels]:
            here.grid(alpha=0.3)
        for here in axes[panels:]:
            here.set_axis_off()
        axes[0].legend()


def draw_curve(axes: Any, curves: Sequence[plot.Points], label: str, colour: str) -> None:
    """Draws the interquartile mean of curves with its intervals into axes of matplotlib."""
    steps, returns = plot.on_one_grid(curves)
    scores = [returns.T]  # [P, N]
    (chosen,) = estimates.resampled([returns], np.random.default_rng(0), _RESAMPLES)
    drawn = estimates.iqm([chosen.swapaxes(1, 2)])  # [resamples, P]
    axes.plot(steps, estimates.iqm(scores), color=colour, label=label)
    axes.fill_between(
        steps, *estimates.interval(drawn, scores), color=colour, alpha=0.25, linewidth=0
    )
    axes.xaxis.set_major_formatter(plot.thousands())


def _draw_profiles(axes: Any, sets: Sequence[Runs], tasks: Sequence[str]) -> None:
    thresholds = np.linspace(0, 1, 101)
    for runs, colour in zip(sets, plot.COLOURS, strict=False):
        scores = _on_one_scale(runs, sets, tasks)
        drawn = estimates.resampled(scores, np.random.default_rng(0), _RESAMPLES)
        axes.plot(thresholds, estimates.profile(scores, thresholds), color=colour)
        band = estimates.interval(estimates.profile(drawn, thresholds), scores)
        axes.fill_between(thresholds, *band, color=colour, alpha=0.25, linewidth=0)
    axes.set(title="performance profile", xlabel="score, as a share of the range of a task")
    axes.set_ylabel("share of runs above it")


if __name__ == "__main__":
    sys.exit(main())
