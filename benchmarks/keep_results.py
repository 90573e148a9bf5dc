# SPDX-License-Identifier: Apache-2.0
"""Keeps the results of benchmarks/presets.sh: curves, thinned logs, and a table line per program.

usage: PYTHONPATH=. python benchmarks/keep_results.py RUNS_FOLDER PRESET

Writes docs/results/PRESET/PROGRAM-SEED.csv for each run: commit, date and command, then at most 150
rows, each over a range of updates. Draws all kept curves of the preset as curve.png in that folder
(result_figures.py has a line for each figure), and prints lines for docs/results.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_figures import FIGURES, RESULTS, draw

from torchbeast.reporting.log_files import read_logs

PROGRAMS = ("monobeast", "polybeast", "raybeast")
# The first are means over the episodes that ended in a range, each counted once; the second means
# over its updates.
OF_EPISODES = ("mean_episode_return", "mean_episode_length")
OF_UPDATES = ("total_loss", "entropy", "grad_norm", "mean_lag", "learning_rate")
COLUMNS = ("step", "seconds", "episodes", *OF_EPISODES, *OF_UPDATES)
ROWS = 150

Row = dict[str, float]


def main() -> None:
    """Keeps the runs of one preset."""
    arguments = _arguments()
    runs, preset = arguments.runs.expanduser(), arguments.preset
    target = RESULTS / preset
    target.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        folders = sorted(path.parent for path in runs.glob(f"{preset}-{program}-[0-9]*/meta.json"))
        for folder in folders:
            write_thinned(folder, target / f"{program}-{folder.name.rpartition('-')[2]}.csv")
        if folders:
            print(table_line(preset, program, folders))
    if f"{preset}/curve" in FIGURES:
        print(draw(f"{preset}/curve"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder that presets.sh wrote")
    parser.add_argument("preset", help="its name")
    return parser.parse_args()


def write_thinned(folder: Path, target: Path) -> None:
    """Writes the run's logs with a row per range of updates, below its provenance."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    rows = list(_with_entropy(with_counts(read_logs(folder)), meta["args"]))
    began = rows[0]["_time"] - rows[0].get("update_seconds", 0.0)
    stretch = math.ceil(len(rows) / ROWS)
    with open(target, "w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in provenance(meta))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for start in range(0, len(rows), stretch):
            writer.writerow(thinned(rows[start : start + stretch], began))


def provenance(meta: dict[str, Any]) -> Iterator[str]:
    """Yields commit, dates and command of each part of a run, a line each."""
    for part in (*meta.get("earlier_parts", ()), meta):
        git = part.get("git") or {"commit": "unknown", "is_dirty": False}
        yield f"commit {git['commit']}" + " with changes that were not committed" * git["is_dirty"]
        yield f"date {part['date_start']} to {part['date_end']}"
        program, words = Path(part["argv"][0]), part["argv"][1:]
        is_module = program.parent.name in ("torchbeast", "")  # agents of a sweep have no path
        path = f"{program.parent.name}/{program.name}"
        called = f"-m torchbeast.{program.stem}" if is_module else path
        yield f"command python {called} {shlex.join(_without_places(words))}"


def _without_places(words: list[str]) -> Iterator[str]:
    """Yields the command line without flags that name folders; other folders are called RUNS."""
    following = iter(words)
    for word in following:
        if word in ("--savedir", "--xpid"):
            next(following)
        elif not word.startswith(("--savedir=", "--xpid=")):
            yield "RUNS" if word.startswith("/") else word


def with_counts(rows: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows with `episodes` as the number that ended in each row instead of the total."""
    before = 0.0
    for row in rows:
        ended = row.get("episodes", before)
        yield {**row, "episodes": max(0.0, ended - before)}
        before = ended


def _with_entropy(rows: Iterator[Row], args: dict[str, Any]) -> Iterator[Row]:
    """Adds the entropy to logs of earlier versions, which hold only the weighted loss."""
    scale = args.get("entropy_cost", 0) * args["unroll_length"] * args["batch_size"]
    for row in rows:
        if "entropy" not in row and "entropy_loss" in row and scale:
            row["entropy"] = -row["entropy_loss"] / scale
        yield row


def thinned(rows: list[Row], began: float) -> list[float | str]:
    """Returns one row of COLUMNS for a range of rows."""
    games = sum(row["episodes"] for row in rows)
    return [
        int(rows[-1]["step"]),
        round(rows[-1]["_time"] - began, 1),
        int(games),
        *(mean_of_games(rows, name) for name in OF_EPISODES),
        *(_mean(rows, name) for name in OF_UPDATES),
    ]


def mean_of_games(rows: list[Row], name: str) -> float | str:
    games = [(row[name], row["episodes"]) for row in rows if name in row and row["episodes"]]
    count = sum(count for _, count in games)
    return _rounded(sum(value * count for value, count in games) / count) if count else ""


def _mean(rows: list[Row], name: str) -> float | str:
    """Returns the mean over the rows that have this figure; an empty cell if none has."""
    values = [row[name] for row in rows if name in row]
    return _rounded(statistics.fmean(values)) if values else ""


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def table_line(preset: str, program: str, folders: list[Path]) -> str:
    """Returns the table line: preset, program, seeds, steps, median minutes, evaluation means.

    Evaluations are greedy first, then sampled.
    """
    seeds = ", ".join(folder.name.rpartition("-")[2] for folder in folders)
    steps = max(steps_trained(folder) for folder in folders)
    minutes = statistics.median(_seconds(folder) / 60 for folder in folders)
    played = [
        ", ".join(f"{evaluated_mean(folder / name):g}" for folder in folders)
        for name in ("evaluation.txt", "evaluation-sampled.txt")
    ]
    return (
        f"| [{preset}]({preset}/curve.png) | {program} | {seeds} | {steps:,} | {minutes:.1f} | "
        f"{played[0]} | {played[1]} |"
    )


def steps_trained(folder: Path) -> int:
    """Returns the steps at the end of the logs.

    The last update exceeds --total_steps a little, and a stopped run has fewer.
    """
    return max(int(row["step"]) for row in read_logs(folder))


def evaluated_mean(said: Path) -> float:
    """Returns the mean return in the output of `--mode test`.

    Raises ValueError when the output has no mean.
    """
    match = re.search(r"^Mean (-?[\d.]+)", said.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"{said} has no line that begins with Mean")
    return float(match[1])


def _seconds(folder: Path) -> float:
    times = [row["_time"] for row in read_logs(folder)]
    return times[-1] - times[0]


if __name__ == "__main__":
    main()
