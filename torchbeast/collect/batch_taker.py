# SPDX-License-Identifier: Apache-2.0
"""Takes batches in another thread, so that the thread that asks for one can wait otherwise."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class BatchTaker:
    """Takes batches from a source in a thread of its own, each when it is asked for.

    Batches are numbered from 1. It keeps the newest batch until you ask for the next one, so you
    can repeat an interrupted `ask` or `wait`: neither loses a batch or takes one too many.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        """batches: of a source."""
        self._batches = batches
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._kept: tuple[int, Any] = 0, None  # the number of the newest batch, and the batch
        # Each entry only says that `_kept` has changed, so an interrupt may lose one.
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def ask(self, number: int) -> None:
        """Asks for this batch, which gives the one before back. May be called again."""
        self._asked.put(number)

    def wait(self, number: int, seconds: float) -> Any:
        """Returns the batch of this number; None if it is not there in time, or never will."""
        until = time.monotonic() + seconds
        while self._kept[0] != number and not self._closed.is_set():
            if (left := until - time.monotonic()) <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                self._changes.get(timeout=left)
        kept, batch = self._kept
        return batch if kept == number else None

    def run(self) -> None:
        """Takes batches until the source or `close` ends it."""
        batches = self._batches()
        while (number := self._asked.get()) and not self._closed.is_set():
            if number == self._kept[0]:
                continue  # it was asked for again after an interrupt
            batch = next(batches, None)
            if batch is None:
                return
            self._kept = number, batch
            if self._changes.empty():  # else what wakes `wait` is still there
                self._changes.put(None)

    def close(self) -> None:
        """Ends both waits here. May be called again."""
        self._closed.set()
        self._asked.put(0)
        self._changes.put(None)
