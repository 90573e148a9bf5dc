# SPDX-License-Identifier: Apache-2.0
"""The activity of actor processes in shared memory: current stages, and seconds in each stage.

An actor that hangs sends no reports, and one with long rollouts sends few. Here the learner reads
the activity of both. Each actor writes its own entry at every change of stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.sources.shared_memory import SharedFile, arrays_at, slot_size

STAGES = ("environment", "inference", "queueing", "starting")
DOING = {
    "environment": "in one step of its environments",
    "inference": "choosing one action",
    "starting": "starting",
}
"""What a worker is doing that has been in a stage for long; in the other one it waits its turn."""

HANG_S = 600.0
"""Longest stay in one stage of `DOING`; PolyBeast waits as long for one step."""

_SPECS = {
    "seconds": ArraySpec((len(STAGES),), "float64"),  # total per stage
    "since": ArraySpec((), "float64"),  # time of the last change, by time.monotonic
    "stage": ArraySpec((), "int64"),
    "steps": ArraySpec((), "int64"),  # of all environments of the actor
}


class Activity:
    """The activity of one worker. Written by one process at a time."""

    def __init__(self, arrays: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._since, self._stage, self._steps = (arrays[name] for name in _SPECS)
        self._now = now

    def start(self) -> None:
        """Records that a process is about to start; counts of its predecessors are kept."""
        self._since[...] = self._now()
        self._stage[...] = STAGES.index("starting")

    def enter(self, stage: str) -> None:
        """Records a change to this stage."""
        now = self._now()
        self._seconds[self._stage] += now - self._since
        self._since[...] = now
        self._stage[...] = STAGES.index(stage)

    def count(self, steps: int) -> None:
        """Adds to the number of steps."""
        self._steps += steps

    def steps(self) -> int:
        """Returns the number of steps, including those of replaced processes."""
        return int(self._steps)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds per stage until the last change."""
        return dict(zip(STAGES, self._seconds.tolist(), strict=True))

    def present(self) -> tuple[str, float]:
        """Returns the current stage, and seconds since it began."""
        return STAGES[int(self._stage)], self._now() - float(self._since)


def local_activity() -> Activity:
    """Returns an activity in the memory of this process."""
    return Activity({name: np.zeros(spec.shape, spec.dtype) for name, spec in _SPECS.items()})


class SharedActivities:
    """The activities of `count` workers in one shared file."""

    def __init__(self, count: int, descriptor: int | None = None) -> None:
        """Creates the file, or opens that of `descriptor`, made with the same count."""
        stride = slot_size(_SPECS)
        self._file = SharedFile(count * stride, descriptor)
        self._arrays = [arrays_at(_SPECS, self._file.bytes, i * stride) for i in range(count)]

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process opens the same file."""
        return self._file.descriptor

    def of(self, index: int) -> Activity:
        """Returns the activity of one worker."""
        return Activity(self._arrays[index])
