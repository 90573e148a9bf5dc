# SPDX-License-Identifier: Apache-2.0
"""Processor time of other processes, as Linux tells it in /proc."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
# Fields after the name, which may hold anything, in `man 5 proc_pid_stat`: user and system ticks.
_PARENT, _USER, _SYSTEM = 1, 11, 12


def cpu_seconds(pids: Iterable[int]) -> float:
    """Of all threads of these processes since they began; NaN where the system does not tell."""
    return sum(_of_one(_fields(pid)) for pid in pids)


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:  # grows while it is read
        found += children.get(member, [])
    return found


def _of_one(fields: list[bytes]) -> float:
    if not fields:
        return math.nan
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _parents() -> Iterator[tuple[int, int]]:
    for folder in _PROC.glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            yield int(folder.name), int(fields[_PARENT])


def _fields(pid: int) -> list[bytes]:
    """[] of a process that is gone, or where there is no /proc."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()
