# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: every run's figure, by name, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from torchbeast.runtime.flags import available_cores

Figures = dict[str, list[float]]  # what was run -> a figure of each run


def in_turn(runs: Mapping[str, Callable[[], float]], repeats: int) -> Figures:
    """The figures of all runs, A B A B: what disturbs the machine disturbs all."""
    figures: Figures = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            figures[name].append(run())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def print_table(figures: Figures, unit: str) -> None:
    """Medians, their ratio to the first, and every run."""
    first = statistics.median(next(iter(figures.values())))
    print(f"| run | {unit}, median | to the first | all |")
    print("| --- | --- | --- | --- |")
    for name, values in figures.items():
        median = statistics.median(values)
        every = ", ".join(f"{value:,.0f}" for value in values)
        print(f"| {name} | {median:,.0f} | {median / first:.2f} | {every} |")


def write_json(path: Path | None, arguments: argparse.Namespace, **figures: object) -> None:
    """Machine, versions, settings and figures."""
    if path is None:
        return
    record = {
        "machine": f"{_processor()}, {available_cores()} cores",
        "torch": torch.__version__,
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        **figures,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def _processor() -> str:
    """The model's name where the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
