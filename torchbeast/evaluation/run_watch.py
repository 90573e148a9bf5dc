# SPDX-License-Identifier: Apache-2.0
"""Whether the run in a folder goes on, as another process sees it, on this machine or another."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torchbeast.reporting.run_folder import is_in_use

# A run writes a row for each update. The lock alone does not tell: it may not reach other machines,
# and a run that is started together with this process takes it seconds later.
QUIET_S = 120.0
_WRITTEN = ("model.tar", "logs.csv", "out.log", "meta.json")


class RunWatch:
    """Looks at the files of a run. Used by one thread."""

    def __init__(
        self, folder: Path, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins to watch the folder, which need not exist.

        quiet_s: seconds without a new byte after which a run that is not seen to run has stopped.
        """
        self._folder, self._quiet_s, self._clock = folder, quiet_s, clock
        self._seen, self._since = self._state(), clock()

    @property
    def is_running(self) -> bool:
        """Whether a process is seen to run in the folder."""
        return is_in_use(self._folder)

    @property
    def has_stopped(self) -> bool:
        """Whether there is a run of which no process is seen, and which wrote nothing for a while.

        Only what was asked while the run still wrote can tell; so ask every few seconds.
        """
        state, now = self._state(), self._clock()
        if state != self._seen or self.is_running:
            self._seen, self._since = state, now
        return any(state) and now - self._since >= self._quiet_s

    def _state(self) -> list[tuple[int, int] | None]:
        return [_size_and_time(self._folder / name) for name in _WRITTEN]


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
