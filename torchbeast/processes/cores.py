# SPDX-License-Identifier: Apache-2.0
"""The processor cores that a program has."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The cores this process may run on, which a container or taskset may have made fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
