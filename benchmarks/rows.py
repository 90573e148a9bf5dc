# SPDX-License-Identifier: Apache-2.0
"""Compares MonoBeast, PolyBeast and RayBeast on Pong with three networks and equal settings.

The rows are the original's: shallow, shallow with LSTM, deep with LSTM. In each round every program
runs once, so that a disturbance affects them alike; a ratio is the median over rounds. With the
default settings a run takes a minute, and everything half an hour.

python benchmarks/rows.py [--rows shallow] [--seconds 30] [--repeats 3] [--csv FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
from pathlib import Path

from figures import Figures, interleaved, write_json
from progress import add_flags, measured, torchbeast

ROWS: dict[str, tuple[str, dict[str, object]]] = {
    "shallow": ("shallow", {}),
    "shallow-lstm": ("shallow", {"use_lstm": True}),
    "deep-lstm": ("deep", {"use_lstm": True}),
}
PROGRAMS = ("monobeast", "polybeast", "raybeast")


def main() -> None:
    arguments = _arguments()
    found: dict[str, Figures] = {}
    for row in arguments.rows:
        model, flags = ROWS[row]
        settings = flags | {
            name: getattr(arguments, name) for name in ("num_envs", "unroll_length", "batch_size")
        }
        runs = {
            name: functools.partial(measured, torchbeast(name, model, settings), arguments)
            for name in arguments.programs
        }
        found[row] = interleaved(runs, arguments.repeats)
        _print(row, found[row], is_first=len(found) == 1)
        write_json(arguments.json, arguments, steps_per_second=found)
        _write_csv(arguments.csv, found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=8)
    add_flags(parser, warm_up=8.0)
    parser.add_argument("--csv", type=Path, help="also write every figure to this file")
    return parser.parse_args()


def _print(row: str, figures: Figures, is_first: bool) -> None:
    """Prints medians of steps/s and of the ratios to the first program, and every figure."""
    if is_first:
        print("| row | program | steps/s, median | to the first, median of rounds | all |")
        print("| --- | --- | --- | --- | --- |")
    first = next(iter(figures.values()))
    for program, values in figures.items():
        ratio = statistics.median(value / to for value, to in zip(values, first, strict=True))
        every = ", ".join(f"{value:,.0f}" for value in values)
        median = statistics.median(values)
        print(f"| {row} | {program} | {median:,.0f} | {ratio:.2f} | {every} |", flush=True)


def _write_csv(path: Path | None, found: dict[str, Figures]) -> None:
    """Writes a line for every run; a no-op without a path."""
    if path is None:
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "program", "round", "steps_per_second"])
        for row, figures in found.items():
            for program, values in figures.items():
                writer.writerows([row, program, i, f"{v:.1f}"] for i, v in enumerate(values))


if __name__ == "__main__":
    main()
