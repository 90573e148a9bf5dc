# SPDX-License-Identifier: Apache-2.0
"""What a measurement gives, and the loop that makes one in this process."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchbeast.processes.supervisor import Supervisor


class Sample(NamedTuple):
    """Steps of all environments, and what they took."""

    steps: float
    seconds: float
    cpu_seconds: float  # of every process involved; NaN where the system does not tell

    @property
    def steps_per_second(self) -> float:
        """The rate."""
        return self.steps / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time a step."""
        return self.cpu_seconds / self.steps * 1e6


Measure = Callable[[float], Sample]
"""Measures for about so many seconds. What it gives after the supervisor ended means nothing."""

_SIGNAL_POLL_S = 0.05


class Ended(Exception):
    """A signal or a failure ended the measuring; the supervisor knows which."""


def check_goes_on(supervisor: Supervisor) -> None:
    """Ended, when it has."""
    if supervisor.wait(0):
        raise Ended


def in_threads(
    bodies: Sequence[Callable[[], int]], seconds: float, supervisor: Supervisor
) -> Sample:
    """Each body again and again in a thread of its own. A body returns the steps it did."""
    began, cpu = time.perf_counter(), time.process_time()

    def loop(body: Callable[[], int]) -> int:
        steps = body()
        while time.perf_counter() - began < seconds and not supervisor.ended:
            steps += body()
        return steps

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(loop, body) for body in bodies]
        while concurrent.futures.wait(futures, _SIGNAL_POLL_S).not_done:
            supervisor.wait(0)  # notes a signal, which the threads then see
        spent = time.perf_counter() - began, time.process_time() - cpu
    return Sample(sum(future.result() for future in futures), *spent)
