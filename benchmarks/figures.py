# SPDX-License-Identifier: Apache-2.0
"""Output shared by the benchmarks: figures of compared runs as a table and as JSON."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from torchbeast.bench import record

Figures = dict[str, list[float]]  # name -> one figure per run


def print_table(figures: Figures, unit: str) -> None:
    """Prints medians, their ratio to the first median, and every figure."""
    first = statistics.median(next(iter(figures.values())))
    print(f"| run | {unit}, median | to the first | all |")
    print("| --- | --- | --- | --- |")
    for name, values in figures.items():
        median = statistics.median(values)
        every = ", ".join(f"{value:,.0f}" for value in values)
        print(f"| {name} | {median:,.0f} | {median / first:.2f} | {every} |")


def write_json(path: Path | None, arguments: argparse.Namespace, **figures: object) -> None:
    """Writes machine, versions, settings and figures; a no-op without a path."""
    if path is not None:
        record.write_json(path, vars(arguments), **figures)
