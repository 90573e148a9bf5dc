# SPDX-License-Identifier: Apache-2.0
"""What each actor process is doing at this moment, and has done until now, in shared memory.

An actor that hangs reports nothing any more, and one whose rollouts take minutes reports rarely:
here the learner reads both without a word from it. Each actor writes its own part, at every change
of what it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.sources.processes.shared_memory import SharedFile, arrays_at, slot_size

STAGES = ("environment", "inference", "queueing", "starting")

_SPECS = {
    "seconds": ArraySpec((len(STAGES),), "float64"),  # in all
    "since": ArraySpec((), "float64"),  # the moment of the last change, of time.monotonic
    "stage": ArraySpec((), "int64"),
    "steps": ArraySpec((), "int64"),  # of all its environments
}


class Activity:
    """Of one actor. Written by one process at a time."""

    def __init__(self, arrays: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._since, self._stage, self._steps = (arrays[name] for name in _SPECS)
        self._now = now

    def start(self) -> None:
        """A process is about to start; what those before it have done stays counted."""
        self._since[...] = self._now()
        self._stage[...] = STAGES.index("starting")

    def enter(self, stage: str) -> None:
        """From now on it does this."""
        now = self._now()
        self._seconds[self._stage] += now - self._since
        self._since[...] = now
        self._stage[...] = STAGES.index(stage)

    def count(self, steps: int) -> None:
        """So many more steps were done."""
        self._steps += steps

    def steps(self) -> int:
        """Steps done, also by processes before."""
        return int(self._steps)

    def seconds(self) -> dict[str, float]:
        """By stage, until the last change."""
        return dict(zip(STAGES, self._seconds.tolist(), strict=True))

    def present(self) -> tuple[str, float]:
        """What it does, and for how many seconds it has."""
        return STAGES[int(self._stage)], self._now() - float(self._since)


class SharedActivities:
    """Of `count` actors, in one shared file."""

    def __init__(self, count: int, descriptor: int | None = None) -> None:
        """Makes the file; or opens the one behind `descriptor`, made with the same count."""
        stride = slot_size(_SPECS)
        self._file = SharedFile(count * stride, descriptor)
        self._arrays = [arrays_at(_SPECS, self._file.bytes, i * stride) for i in range(count)]

    @property
    def descriptor(self) -> int:
        """What a process needs to open the same."""
        return self._file.descriptor

    def of(self, index: int) -> Activity:
        """That of one actor."""
        return Activity(self._arrays[index])
