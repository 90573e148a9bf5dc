# SPDX-License-Identifier: Apache-2.0
"""Joins rollouts of any width into batches, in buffers that are used again and again.

rollouts [T+1, E, ...] -- collect() --> the batch in preparation [T+1, B, ...]
                          one thread          |            ^
                                              v            | free again
                                           batches() of every learner thread
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torchbeast.core.storages.rollout import Rollout
from torchbeast.sources.processes.rollout_buffers import Batch, RolloutArrays


class Written(NamedTuple):
    """A written rollout of several environments."""

    arrays: RolloutArrays
    num_envs: int
    release: Callable[[], None]  # called by the collector once every column is copied


class Collector:
    """Fills batches in one thread for learner threads.

    num_bytes: of all its batches.

    Closing: `close` ends `collect`, and every iterator once the full batches are taken.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.num_bytes = 0
        self._ready: queue.Queue[Batch | None] = queue.Queue()
        self._free: queue.Queue[Batch | None] = queue.Queue()
        for batch in batches:
            self.num_bytes += batch.num_bytes
            self._free.put(batch)

    def __len__(self) -> int:
        """Number of full batches that wait for a learner thread."""
        return self._ready.qsize()

    def collect(self, rollouts: Iterator[Written]) -> None:
        """Copies the columns of rollouts into batches until there are no more, or until closed."""
        rollout, first = None, 0
        while (batch := self._free.get()) is not None:
            while batch.missing:
                if rollout is None:
                    if (rollout := next(rollouts, None)) is None:
                        return
                    first = 0
                count = min(batch.missing, rollout.num_envs - first)
                batch.add(rollout.arrays, first, count)
                first += count
                if first == rollout.num_envs:
                    rollout.release()
                    rollout = None
            self._ready.put(batch)

    def batches(self) -> Iterator[Rollout]:
        """Yields batches, each valid until the iterator advances or ends."""
        while (batch := self._ready.get()) is not None:
            try:
                yield batch.rollout()
            finally:  # also if the iterator is abandoned
                batch.clear()
                self._free.put(batch)
        self._ready.put(None)  # for the next thread

    def close(self) -> None:
        """Wakes every waiting thread. May be called again."""
        self._ready.put(None)
        self._free.put(None)
