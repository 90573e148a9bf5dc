# SPDX-License-Identifier: Apache-2.0
"""Keeps the runs of the zoo, and writes their page and pictures: docs/results/zoo.md.

usage: PYTHONPATH=. python benchmarks/zoo.py keep RUNS/zoo/PRESET ...
       PYTHONPATH=. python benchmarks/zoo.py page

`keep` adds the runs that have ended to docs/results/zoo/PRESET.csv, next to the seeds that are
there from earlier or from other machines, and writes the preset's record and agent in
torchbeast/zoo. Call it on the machine of the runs, because it notes the machine.

`page` writes everything else from these files, from the published figures in published.csv, and
from notes.csv, which says why rows are below them.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from keep_results import mean_of_games, provenance, with_counts
from result_figures import RESULTS

from torchbeast import compare, plot, zoo
from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError
from torchbeast.reporting import estimates
from torchbeast.reporting.estimates import Estimate
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import read_meta, write_atomically
from torchbeast.zoo import PRESETS

FOLDER, PAGE = RESULTS / "zoo", RESULTS / "zoo.md"
RECORDS = Path(zoo.__file__).with_name("records.json")
FIRST_SEED = 101  # of the held-out ones
EPISODES = 100  # of the last evaluation
_NEEDED = (
    f"expected an ended run with a seed from {FIRST_SEED} on and {EPISODES} evaluated episodes"
)
POINTS = 30  # of a curve
_FEWEST = 3  # runs with an interval
FAMILIES = {
    "toy": "Toy tasks",
    "classic": "Classic control",
    "box2d": "Box2D",
    "mujoco": "MuJoCo",
    "minatar": "MinAtar",
    "minigrid": "MiniGrid",
    "atari": "Atari",
    "agents": "Several agents",
}
COLUMNS = ("seed", "step", "minutes", "mean_return", "greedy_return", "commit", "date", "machine")

Row = dict[str, str]


@dataclass(frozen=True)
class Kept:
    """The kept runs of a preset.

    Attributes:
        command: The command line of a run.
        settings: Those that all runs share.
        runs: The points of each curve by seed. The last point also has the mean return of greedy
            episodes, and where the run comes from.
    """

    command: str
    settings: Mapping[str, Any]
    runs: Mapping[int, Sequence[Row]]

    @property
    def ends(self) -> list[Row]:
        """The last point of each run."""
        return [points[-1] for points in self.runs.values()]

    @cached_property
    def scores(self) -> np.ndarray:
        """The score of each run, [N]."""
        return np.array([float(end["greedy_return"]) for end in self.ends])

    @cached_property
    def score(self) -> Estimate:
        """Interquartile mean of the scores, with its 95 % interval."""
        return compare.compared([[self.scores]]).iqm[0]

    @property
    def curves(self) -> list[plot.Points]:
        """Mean returns of training by step."""
        curves: list[plot.Points] = [
            [(int(p["step"]), float(p["mean_return"])) for p in points if p["mean_return"]]
            for points in self.runs.values()
        ]
        return [curve for curve in curves if curve]


def main() -> None:
    """Runs the command."""
    arguments = _arguments()
    try:
        if arguments.command == "keep":
            for folder in arguments.folders:
                keep(folder.expanduser().absolute())
        else:
            write_page()
    except UsageError as error:
        sys.exit(str(error))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep", help="add the runs of presets to the results")
    keeping.add_argument("folders", type=Path, nargs="+", help="the folder of a preset's sweep")
    commands.add_parser("page", help="write the page and the pictures")
    return parser.parse_args()


def keep(folder: Path) -> None:
    """Adds the runs of a preset to its CSV, and updates its record and its agent."""
    name = folder.name
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise UsageError(f"{folder} must have the name of a preset, as RUNS/zoo/hopper-sac{hint}")
    path = FOLDER / f"{name}.csv"
    kept = read(path) if path.exists() else Kept("", {}, {})
    folders = {}
    for run in sorted(meta.parent for meta in folder.glob("*/meta.json")):
        if (new := run_of(run)) is None:
            print(f"Skipping {run}: {_NEEDED}.")
            continue
        kept = merged(kept, new, path)
        (seed,) = new.runs
        if kept.runs[seed][-1]["date"] == new.runs[seed][-1]["date"]:  # else a newer one is kept
            folders[seed] = run
    if not kept.runs:
        raise UsageError(f"no run in {folder} can be kept: train the preset first")
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_csv(kept).encode())
    write_record(name, kept, folders)
    missing = sorted(planned(name) - set(kept.runs))
    print(f"{name}: {len(kept.runs)} seeds kept, missing {missing or 'none'}")


def planned(name: str) -> set[int]:
    """Returns the seeds that the preset is trained with."""
    return set(range(FIRST_SEED, FIRST_SEED + PRESETS[name].seeds))


def run_of(folder: Path) -> Kept | None:
    """Reads a run with a held-out seed; returns None unless it has ended with an evaluation."""
    meta, settings = read_meta(folder), plot.settings_of_run(folder)
    evaluations = folder / "evaluations.csv"
    is_ended = meta.get("successful") and evaluations.exists()
    played = [*read_logs(evaluations)] if is_ended else []
    if not played or played[-1]["num_episodes"] != EPISODES:
        return None
    seed = meta["args"]["seed"]
    if seed < FIRST_SEED or played[-1]["step"] < settings["total_steps"]:
        return None
    rows, parts = [*with_counts(read_logs(folder))], [*meta["earlier_parts"], meta]
    minutes = minutes_of(rows, [datetime.fromisoformat(part["date_start"]) for part in parts])
    empty = dict.fromkeys(COLUMNS, "") | {"seed": str(seed)}
    points = [empty | point for point in _points(rows, minutes)]
    points[-1] |= {
        "greedy_return": f"{played[-1]['mean_episode_return']:g}",
        "commit": " ".join(dict.fromkeys(map(_commit, parts))),
        "date": meta["date_end"],
        "machine": machine(),
    }
    *_, command = provenance(meta)
    command = re.sub(rf"--seed[= ]{seed}\b", "--seed=SEED", command.removeprefix("command "))
    return Kept(command, settings, {seed: points})


def _commit(part: Mapping[str, Any]) -> str:
    git = part.get("git") or {"commit": "unknown", "is_dirty": False}
    return git["commit"][:10] + "+" * git["is_dirty"]


def machine() -> str:
    """Describes this machine."""
    import figures  # imports torch

    return figures.machine()


def minutes_of(rows: Sequence[Mapping[str, float]], starts: Sequence[datetime]) -> list[float]:
    """Returns the minutes of training until each row, without evaluations, and without the time
    between the parts of a run, which began at `starts`.
    """
    begun = [start.timestamp() for start in starts]
    between = [
        math.nan
        if "evaluation_mean_return" in now or any(before["_time"] < t < now["_time"] for t in begun)
        else (now["_time"] - before["_time"]) / 60
        for before, now in pairwise(rows)
    ]
    usual = float(np.nanmean(between))
    return [*accumulate(usual if math.isnan(part) else part for part in [math.nan, *between])]


def _points(rows: Sequence[dict[str, float]], minutes: Sequence[float]) -> Iterator[Row]:
    stretch = math.ceil(len(rows) / POINTS)
    for start in range(0, len(rows), stretch):
        part = list(rows[start : start + stretch])
        yield {
            "step": str(int(part[-1]["step"])),
            "minutes": f"{minutes[start + len(part) - 1]:.2f}",
            "mean_return": str(mean_of_games(part, "mean_episode_return")),
        }


def merged(kept: Kept, new: Kept, path: Path) -> Kept:
    """Adds runs, or replaces older ones with the same seed.

    Raises UsageError if their settings differ from those in the file at `path`.
    """
    for name, value in new.settings.items():
        if kept.settings.get(name, value) != value:
            raise UsageError(
                f"all runs of {path.stem} need the same settings, but {path} has {name} "
                f"{kept.settings[name]}, and the new run {value}: remove the file to start over"
            )
    newer = {
        seed: points
        for seed, points in new.runs.items()
        if seed not in kept.runs or points[-1]["date"] > kept.runs[seed][-1]["date"]
    }
    runs = dict(sorted({**kept.runs, **newer}.items()))
    return Kept(kept.command or new.command, {**new.settings, **kept.settings}, runs)


def as_csv(kept: Kept) -> str:
    """Returns the contents of a preset's file."""
    lines = [f"# command {kept.command}", f"# settings {json.dumps(kept.settings, sort_keys=True)}"]
    lines += [",".join(COLUMNS)]
    for points in kept.runs.values():
        lines += [",".join(_quoted(point[name]) for name in COLUMNS) for point in points]
    return "\n".join([*lines, ""])


def _quoted(cell: str) -> str:
    return f'"{cell}"' if "," in cell else cell


def read(path: Path) -> Kept:
    """Reads a preset's file."""
    command, settings, *lines = path.read_text(encoding="utf-8").splitlines()
    runs: dict[int, list[Row]] = {}
    for point in csv.DictReader(lines):
        runs.setdefault(int(point["seed"]), []).append(point)
    read_settings = json.loads(settings.removeprefix("# settings "))
    return Kept(command.removeprefix("# command "), read_settings, runs)


def record_of(kept: Kept) -> dict[str, Any]:
    """Returns the preset's entry in records.json, without its agent."""
    value, *interval = (float(f"{number:.7g}") for number in kept.score)
    return {
        "score": value,
        "interval": interval,
        "seeds": len(kept.runs),
        "steps": kept.settings["total_steps"],
        "minutes": round(statistics.median(float(end["minutes"]) for end in kept.ends), 1),
    }


def write_record(name: str, kept: Kept, folders: Mapping[int, Path]) -> None:
    """Writes the preset's entry in records.json, and its agent, if the folder of its run is here.

    That is the run whose score is the preset's or just above it: where half the seeds fail, a user
    gets an agent that does not.
    """
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    score = kept.score.value
    least = score - 1e-6 * abs(score)  # equal scores have a mean that is rounded
    good = [end for end in kept.ends if float(end["greedy_return"]) >= least]
    typical = min(good, key=lambda end: float(end["greedy_return"]))
    agent = records.get(name, {}).get("agent")
    if (run := folders.get(int(typical["seed"]))) is not None:
        agent = agent_of(run, name)
    records[name] = record_of(kept) | ({"agent": agent} if agent else {})
    lines = [f' "{name}": {json.dumps(records[name])}' for name in PRESETS if name in records]
    write_atomically(RECORDS, "{{\n{}\n}}\n".format(",\n".join(lines)).encode())


def agent_of(run: Path, name: str) -> dict[str, Any] | None:
    """Writes the agent of a run to the package; returns its entry, or None if it is too large."""
    import zoo_agents  # imports torch

    try:
        zoo_agents.save(run, name)
    except ValueError as error:
        print(f"No agent: {error}")
        return None
    entry: dict[str, Any] = zoo_agents.row(run, name)
    return entry


class Figure(NamedTuple):
    """A published figure: the mean score of some runs."""

    source: str
    algorithm: str
    environment: str
    steps: int
    mean: float
    half: float
    """Half of the 95 % interval of the mean; 0 for a single run, and if their number is unknown."""
    runs: str
    address: str
    note: str
    scores: np.ndarray
    """The score of each run, [N], if it is published."""


# Student's 97.5 % quantile, by the number of runs.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 20: 2.093, 30: 2.045}


def published() -> dict[str, Figure]:
    """Returns the published figures by source, algorithm and environment."""
    with open(FOLDER / "published.csv", newline="", encoding="utf-8") as file:
        return {
            f"{row['source']} {row['algorithm']} {row['environment']}": Figure(
                row["source"],
                row["algorithm"],
                row["environment"],
                int(row["steps"]),
                float(row["mean"]),
                half_interval(float(row["std"] or 0), int(row["seeds"] or 1)),
                row["seeds"] or "?",
                row["address"],
                row["note"],
                np.array(row["scores"].split(), float),
            )
            for row in csv.DictReader(file)
        }


def half_interval(std: float, runs: int) -> float:
    """Returns half of the 95 % interval of the mean of runs; 0 for a single run.

    std: with the number of runs as divisor, as numpy computes it.
    """
    return _STUDENT[runs] * std / math.sqrt(runs - 1) if runs > 1 else 0.0


def verdict(ours: Estimate, theirs: Figure, runs: int) -> str:
    """Says where our interval lies, compared with the published one; runs: how many are ours."""
    if runs < _FEWEST:
        return "too few"
    if ours.low > theirs.mean + theirs.half:
        return "above"
    return "below" if ours.high < theirs.mean - theirs.half else "inside"


def all_kept() -> dict[str, Kept]:
    """Reads the kept runs, in the order of the presets."""
    paths = {name: FOLDER / f"{name}.csv" for name in PRESETS}
    return {name: read(path) for name, path in paths.items() if path.exists()}


def write_page() -> None:
    """Writes the page, and a picture for each family."""
    page = Page(all_kept())
    PAGE.write_text(page.text(), encoding="utf-8")
    print(PAGE)
    if unexplained := page.unexplained():
        print(f"notes.csv does not say why these are below: {', '.join(unexplained)}")
    for family in FAMILIES:
        if names := page.names(family):
            page.draw(names, FOLDER / f"{family}.png")
            print(FOLDER / f"{family}.png")


_ABOUT = """\
# The zoo

Presets next to published figures. One command trains rows again, and continues where it stopped:

```shell
python -m torchbeast.suite zoo --only 'lunarlander-*'
```

* **Ours**: interquartile mean over the seeds, with its 95 % interval, which is too narrow for three
  seeds. No setting was tuned on these seeds, which begin at 101. The score of a seed is the mean
  return of 100 greedy episodes after training. In runs before commit 5f0a37dd, all
  seeds of a row played the same starts, so the interval leaves out their chance: about ±18 for
  Pendulum.
* **Published**: a mean, with half of its 95 % interval (Student's t) if it is one of several runs.
  Tianshou's is the mean of each run's best evaluation, ours the last one.
* **Above, inside, below**: our interval is above the published interval, overlaps it, or is below
  it. A single run has no interval, so its figure alone counts.{chance}
* **Minutes**: median training time of a run on two cores, shared with another run and often with
  other work.{machines}
"""
_CHANCE = """
  P is the probability that one of our runs beats one of theirs, if these are published."""
_CAPTION = """Lines: interquartile means of returns in training,
with 95 % intervals. Squares: our scores, 100 greedy episodes.
Dotted: the first published figure."""
_PANELS = 3  # in a row
_FAR = 5  # times as many steps: then the axis is logarithmic
_OURS, _THEIRS = (
    ("preset", "ours", "seeds", "steps", "minutes"),
    ("compared", "published", "runs", "their steps"),
)
_ALGOS = {"ppo": 0, "impala": 1, "dqn": 2, "sac": 2, "pqn": 3, "td3": 3, "laser": 4}


class Page:
    """The page of the zoo, and its pictures."""

    def __init__(self, kept: Mapping[str, Kept]) -> None:
        """kept: the runs of each preset, in the order of the presets."""
        self._kept, self._figures = kept, published()
        with open(FOLDER / "notes.csv", newline="", encoding="utf-8") as file:
            self._notes = {row["preset"]: row["note"] for row in csv.DictReader(file)}
        ends = [end for each in kept.values() for end in each.ends]
        self._machines = list(dict.fromkeys(end["machine"] for end in ends))
        self._cited: dict[tuple[str, str], tuple[int, Figure]] = {}  # by address and note
        self._colours = {algo: plot.COLOURS[number] for algo, number in _ALGOS.items()}

    def names(self, family: str) -> list[str]:
        """Returns the presets of a family that have kept runs."""
        return [name for name in self._kept if PRESETS[name].family == family]

    def text(self) -> str:
        """Returns the page as Markdown."""
        marked = [f"{self._mark(machine)} {machine}".strip() for machine in self._machines]
        machines = "".join(f"\n  {each}." for each in marked)
        families = [part for family in FAMILIES for part in self._section(family)]
        sources = [f'[{n}]: {each.address} "{each.note}"' for n, each in self._cited.values()]
        chance = _CHANCE if " P " in "".join(families) else ""
        about = _ABOUT.format(machines=machines, chance=chance)
        return "\n".join([about, *families, "\n".join(sources) + "\n"])

    def _section(self, family: str) -> Iterator[str]:
        names, title = self.names(family), FAMILIES[family]
        if names:
            yield f"## {title}\n"
            yield _table([[*_OURS, *_THEIRS], *(row for name in names for row in self._rows(name))])
            yield f"![Learning curves and scores]({FOLDER.name}/{family}.png)\n"
        if notes := [f"* **{name}**: {self._notes[name]}" for name in names if name in self._notes]:
            yield "\n".join([*notes, ""])
        of_family = [name for name in PRESETS if PRESETS[name].family == family]
        if waiting := [name for name in of_family if name not in names and PRESETS[name].seeds]:
            yield f"{title}, not trained yet: {', '.join(waiting)}.\n"

    def _rows(self, name: str) -> Iterator[list[str]]:
        """Yields a row for each published figure, of which the first has our score."""
        kept = self._kept[name]
        value, low, high = map(_number, kept.score)
        seeds, wanted, record = len(kept.runs), PRESETS[name].seeds, record_of(kept)
        marks = "".join(sorted({self._mark(end["machine"]) for end in kept.ends}))
        ours = [
            f"[{name}](zoo/{name}.csv)",
            f"{value} [{low}, {high}]",
            str(seeds) if seeds >= wanted else f"{seeds} of {wanted}",
            _steps(record["steps"]),
            f"{record['minutes']:g} {marks}".strip(),
        ]
        compared = [self._compared(kept, figure) for figure in self.theirs(name)]
        for theirs in compared or [len(_THEIRS) * [""]]:
            yield ours + theirs
            ours = len(_OURS) * [""]

    def _compared(self, kept: Kept, figure: Figure) -> list[str]:
        """Returns the cells about a published figure."""
        said = verdict(kept.score, figure, len(kept.runs))
        key = figure.address, figure.note
        number, _ = self._cited.setdefault(key, (len(self._cited) + 1, figure))
        if figure.scores.size:
            chance = estimates.probability_of_improvement([kept.scores], [figure.scores])
            said += f" P {float(chance):.2f}"
        version = figure.environment.rpartition("-")[2]
        differs = [figure.algorithm] if figure.algorithm != kept.settings["algo"] else []
        differs += [version] if not kept.settings["env"].endswith(version) else []
        half = f" ±{_number(figure.half, 3)}" if figure.half else ""
        cited = [f"{_number(figure.mean)}{half} [{figure.source}][{number}]", *differs]
        return [said, " ".join(cited), figure.runs, _steps(figure.steps)]

    def theirs(self, name: str) -> list[Figure]:
        """Returns the figures that a preset is compared with."""
        labels = (PRESETS[name].published or "").strip().splitlines()
        for label in labels:
            if label not in self._figures:
                hint = did_you_mean(label, self._figures)
                raise UsageError(f"{name} needs a row {label!r} in published.csv{hint}")
        return [self._figures[label] for label in labels]

    def _mark(self, machine: str) -> str:
        """Returns a letter for a machine, if there are several."""
        return "abcdefgh"[self._machines.index(machine)] if len(self._machines) > 1 else ""

    def unexplained(self) -> list[str]:
        """Returns the presets that are below a published figure without a note."""
        return [
            name
            for name, kept in self._kept.items()
            if name not in self._notes
            and "below" in [verdict(kept.score, each, len(kept.runs)) for each in self.theirs(name)]
        ]

    def draw(self, names: Sequence[str], output: Path) -> None:
        """Draws the learning curves of presets, each environment in a panel."""
        panels: dict[str, list[str]] = {}
        for name in names:
            panels.setdefault(self._kept[name].settings["env"], []).append(name)
        columns = min(len(panels), _PANELS)
        rows = math.ceil(len(panels) / columns)
        with plot.figure_for([output], (3.6 * columns, 0.6 + 2.9 * rows)) as figure:
            figure.supxlabel(_CAPTION, fontsize="x-small")
            every = figure.subplots(rows, columns, squeeze=False).flatten()
            for axes, (env, here) in zip(every, panels.items(), strict=False):
                self._draw_panel(axes, here)
                axes.set_title(env, fontsize="medium")
            for axes in every[len(panels) :]:
                axes.set_axis_off()

    def _draw_panel(self, axes: Any, names: Sequence[str]) -> None:
        for name in names:
            self._draw_preset(axes, name)
        steps = [self._kept[name].settings["total_steps"] for name in names]
        if max(steps) >= _FAR * min(steps):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(plot.thousands())
        axes.set(xlabel="environment steps", ylabel="mean return")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")

    def _draw_preset(self, axes: Any, name: str) -> None:
        kept, algo = self._kept[name], self._kept[name].settings["algo"]
        label = name[name.find(algo) :] if algo in name else name
        colour = self._colours.setdefault(label, plot.COLOURS[(len(self._colours) - 2) % 8])
        compare.draw_curve(axes, kept.curves, label.upper(), colour)
        value, low, high = kept.score
        ends = [[value - low], [high - value]]
        axes.errorbar(kept.settings["total_steps"], value, ends, color=colour, marker="s", ms=4)
        for theirs in self.theirs(name)[:1]:
            axes.axhline(theirs.mean, color=colour, linestyle=":", label=theirs.source)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose columns are aligned, to be read without a browser."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in padded]
    rule = f"| {' | '.join('-' * width for width in widths)} |"
    return "\n".join([lines[0], rule, *lines[1:], ""])


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _steps(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps / 1e3:g}k"


if __name__ == "__main__":
    main()
