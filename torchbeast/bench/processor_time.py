# SPDX-License-Identifier: Apache-2.0
"""CPU time of other processes, read from Linux's /proc."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
# Fields after the process name in `man 5 proc_pid_stat`; times are in clock ticks.
_PARENT, _USER, _SYSTEM = 1, 11, 12


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU time of these processes since they began; NaN where it is unknown."""
    return sum(_cpu_seconds(_fields(pid)) for pid in pids)


def family(pid: int) -> list[int]:
    """Returns the process and all of its descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:  # the list grows during the iteration
        found += children.get(member, [])
    return found


def _cpu_seconds(fields: list[bytes]) -> float:
    if not fields:
        return math.nan
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _parents() -> Iterator[tuple[int, int]]:
    for folder in _PROC.glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            yield int(folder.name), int(fields[_PARENT])


def _fields(pid: int) -> list[bytes]:
    """Returns [] for a process that is gone, or where there is no /proc."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()
