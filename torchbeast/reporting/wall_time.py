# SPDX-License-Identifier: Apache-2.0
"""The time of day for logs, which goes on evenly when somebody sets the clock of the system."""

from __future__ import annotations

import math
import time


class WallTime:
    """Seconds since 1970: the system's clock at the start, and the time that has passed since."""

    def __init__(self, at_least: float = -math.inf) -> None:
        """Reads the system's clock, for the only time.

        at_least: seconds since 1970 of what was logged before, where the clock may be behind it.
        """
        self._start = max(time.time(), at_least) - _elapsed()

    def now(self) -> float:
        """Returns the seconds since 1970; never less than before."""
        return self._start + _elapsed()


def _elapsed() -> float:
    """Returns seconds that no setting of the clock changes; on Linux with those of a suspend."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
