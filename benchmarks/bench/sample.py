# SPDX-License-Identifier: Apache-2.0
"""The result of a measurement, and the loop that makes one in this process."""

from __future__ import annotations

import concurrent.futures
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchbeast.fleets.supervisor import Supervisor

_PROC = Path("/proc")
# Fields after the process name in `man 5 proc_pid_stat`; times are in clock ticks.
_PARENT, _USER, _SYSTEM = 1, 11, 12


class Sample(NamedTuple):
    """Steps of all environments, and the time they took."""

    steps: float
    seconds: float
    cpu_seconds: float  # of every process involved; NaN where the system does not report it

    @property
    def steps_per_second(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time per step, in microseconds."""
        return self.cpu_seconds / self.steps * 1e6


Measure = Callable[[float], Sample]
"""Measures for about that many seconds, and until there was a step. After the supervisor ended,
results are meaningless.
"""

_SIGNAL_POLL_S = 0.05


class Ended(Exception):
    """A signal or a failure, which the supervisor knows, ended the measurements."""


def check_goes_on(supervisor: Supervisor) -> None:
    """Raises Ended if the supervisor has ended."""
    if supervisor.wait(0):
        raise Ended


def in_threads(
    bodies: Sequence[Callable[[], int]], seconds: float, supervisor: Supervisor
) -> Sample:
    """Runs each body repeatedly in a thread of its own; a body returns the steps it made."""
    began, cpu = time.perf_counter(), time.process_time()

    def loop(body: Callable[[], int]) -> int:
        steps = body()
        while time.perf_counter() - began < seconds and not supervisor.ended:
            steps += body()
        return steps

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(loop, body) for body in bodies]
        while concurrent.futures.wait(futures, _SIGNAL_POLL_S).not_done:
            supervisor.wait(0)  # handles signals, so that the threads see the end
        spent = time.perf_counter() - began, time.process_time() - cpu
    return Sample(sum(future.result() for future in futures), *spent)


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
