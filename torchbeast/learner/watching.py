# SPDX-License-Identifier: Apache-2.0
"""Says what a step of a Learner waits for, when it takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchbeast.learning.training import Training
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.diagnosis import Watchdog
from torchbeast.reporting.waiting import warn
from torchbeast.sources.contract import Source

_LOOK_S = 1.0


class Watching:
    """The watchdog of a Learner, in a thread of the supervisor. It does not know the Learner."""

    def __init__(self, training: Training, source: Source, rollouts_at_once: int) -> None:
        """rollouts_at_once: rollouts in a batch."""
        self._training, self._source = training, source
        self._rollouts_at_once = rollouts_at_once
        self._is_in_step = False

    def start(self, supervisor: Supervisor) -> None:
        """Starts the thread, which ends with the run."""
        ended = threading.Event()
        supervisor.on_close(ended.set)
        supervisor.start_thread("watch", lambda: self._watch(ended))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watches the block: between two steps a Learner waits for nobody."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def _watch(self, ended: threading.Event) -> None:
        watchdog = Watchdog(time.monotonic(), self._rollouts_at_once)
        while not ended.wait(_LOOK_S):
            now = time.monotonic()
            if not self._is_in_step:
                watchdog.restart(now)
                continue
            status, hanging = self._source.status(), self._source.hanging()
            if stall := watchdog.check(self._training.updates_here, status, now, hanging):
                warn(stall)
