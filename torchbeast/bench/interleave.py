# SPDX-License-Identifier: Apache-2.0
"""Interleaved measurements, A B A B, so that a temporary disturbance affects all runs alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def interleaved(runs: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Runs each function `repeats` times, interleaved; returns the results by name.

    Prints a dot on stderr for each run.
    """
    figures: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            figures[name].append(run())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures
