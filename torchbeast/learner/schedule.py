# SPDX-License-Identifier: Apache-2.0
"""When a callback acts: every so many env steps, or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchbeast.core.checks import require


class Schedule:
    """Says when the next time has come. Multiples of steps count from the beginning of the run,
    seconds from the time before.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the one that is not None."""
        require(
            (every_steps is None) != (every_seconds is None),
            f"give either every_steps or every_seconds, got {every_steps} and {every_seconds}",
        )
        every = every_steps if every_seconds is None else every_seconds
        assert every is not None
        require(every > 0, f"every_steps and every_seconds must be more than 0, got {every}")
        self._every = every
        self._in_steps = every_seconds is None
        self._clock = clock
        self._last = 0.0

    def mark(self, steps: int) -> None:
        """Waits from now on, after `steps` env steps of the run."""
        self._last = self._now(steps)

    def is_due(self, steps: int) -> bool:
        """Returns whether a multiple of steps was passed, or the seconds, since the last mark."""
        now, every = self._now(steps), self._every
        return now // every > self._last // every if self._in_steps else now - self._last >= every

    def _now(self, steps: int) -> float:
        return steps if self._in_steps else self._clock()
