# SPDX-License-Identifier: Apache-2.0
"""The number of processor cores available to a program."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Returns the number of cores this process may run on; containers and taskset limit it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
