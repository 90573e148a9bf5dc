# SPDX-License-Identifier: Apache-2.0
"""Keeps what benchmarks/presets.sh made: curves, thinned logs, and a line of figures a program.

usage: PYTHONPATH=. python benchmarks/keep_results.py RUNS_FOLDER PRESET

Writes docs/results/PRESET/curve.png (both programs over all their steps), a CSV of at most 150
rows for each run, each row the mean over a stretch of updates, and prints the lines of the table in
docs/results/README.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from torchbeast import plot
from torchbeast.runtime.log_files import read_logs

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COLUMNS = ("step", "seconds", "mean_episode_return", "mean_episode_length", "total_loss")
ROWS = 150


def main() -> None:
    """Keeps the runs of one preset."""
    arguments = _arguments()
    runs, preset = arguments.runs.expanduser(), arguments.preset
    found = {
        program: sorted(folder for folder in runs.glob(f"{preset}-{program}-[0-9]"))
        for program in ("monobeast", "polybeast")
    }
    target = RESULTS / preset
    target.mkdir(parents=True, exist_ok=True)
    for program, folders in found.items():
        for folder in folders:
            write_thinned(folder, target / f"{program}-{folder.name.rpartition('-')[2]}.csv")
        if folders:
            print(table_line(preset, program, folders))
    every = [str(folder) for folders in found.values() for folder in folders]
    plot.main([*every, "--output", str(target / "curve.png")])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder that presets.sh filled")
    parser.add_argument("preset")
    return parser.parse_args()


def write_thinned(folder: Path, target: Path) -> None:
    """The run's logs with the means of equal stretches as rows."""
    rows = list(read_logs(folder))
    began = rows[0]["_time"] - rows[0].get("update_seconds", 0.0)
    stretch = math.ceil(len(rows) / ROWS)
    with open(target, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for start in range(0, len(rows), stretch):
            part = rows[start : start + stretch]
            means = [_mean(part, name) for name in COLUMNS[2:]]
            writer.writerow([int(part[-1]["step"]), round(part[-1]["_time"] - began, 1), *means])


def _mean(rows: list[dict[str, float]], name: str) -> float | str:
    """Of the rows that have it; an empty cell where none has."""
    values = [row[name] for row in rows if name in row]
    return float(f"{statistics.fmean(values):.4g}") if values else ""


def table_line(preset: str, program: str, folders: list[Path]) -> str:
    """Preset, program, steps, minutes (median), evaluated means, their median."""
    means = [evaluated_mean(folder) for folder in folders]
    steps = max(steps_trained(folder) for folder in folders)
    minutes = statistics.median(_seconds(folder) / 60 for folder in folders)
    each = ", ".join(f"{mean:g}" for mean in means)
    return (
        f"| [{preset}]({preset}/curve.png) | {program} | {steps:,} | {minutes:.1f} | {each} | "
        f"**{statistics.median(means):g}** |"
    )


def steps_trained(folder: Path) -> int:
    """Where the logs end: the last update goes a little beyond --total_steps, and a run that was
    stopped has fewer.
    """
    return max(int(row["step"]) for row in read_logs(folder))


def evaluated_mean(folder: Path) -> float:
    """What `--mode test` said."""
    said = (folder / "evaluation.txt").read_text(encoding="utf-8")
    match = re.search(r"^Mean (-?[\d.]+)", said, re.MULTILINE)
    if match is None:
        raise ValueError(f"{folder}/evaluation.txt has no line that begins with Mean")
    return float(match[1])


def _seconds(folder: Path) -> float:
    times = list(_times(folder))
    return times[-1] - times[0]


def _times(folder: Path) -> Iterator[float]:
    for row in read_logs(folder):
        yield row["_time"]


if __name__ == "__main__":
    main()
