# SPDX-License-Identifier: Apache-2.0
"""A thread that takes batches from a source, for a caller that must not wait for long."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class BatchTaker:
    """Takes batches from a source in a separate thread, one for each `ask`, so that the caller can
    wait with a timeout.

    Batches are numbered from 1. It keeps the newest batch until you ask for the next one. If `ask`
    or `wait` is interrupted, you can call it again: batches are neither lost nor taken twice.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        """batches: the method `batches` of a source."""
        self._batches = batches
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._kept: tuple[int, Any] = 0, None  # the number of the newest batch, and the batch
        # Each entry only says that `_kept` has changed, so an interrupt may lose one.
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def ask(self, number: int) -> None:
        """Asks for this batch, which returns the batch before it. May be called again."""
        self._asked.put(number)

    def wait(self, number: int, seconds: float) -> Any:
        """Returns the batch with this number; None on a timeout or after the end."""
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
                continue  # after an interrupt, `ask` was called again
            batch = next(batches, None)
            if batch is None:
                return
            self._kept = number, batch
            if self._changes.empty():  # else the entry that wakes `wait` is still there
                self._changes.put(None)

    def close(self) -> None:
        """Ends both waits here. May be called again."""
        self._closed.set()
        self._asked.put(0)
        self._changes.put(None)
