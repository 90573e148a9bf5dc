# SPDX-License-Identifier: Apache-2.0
"""Measuring in turn, A B A B: what disturbs the machine for a while disturbs all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def interleaved(runs: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What every run gave, by name; a dot on stderr for each."""
    figures: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            figures[name].append(run())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures
