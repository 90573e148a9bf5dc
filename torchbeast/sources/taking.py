# SPDX-License-Identifier: Apache-2.0
"""Takes batches in another thread, so that the thread that asks for one can wait otherwise."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Taking:
    """Takes batches from a source in a thread of its own, each when it is asked for."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        """batches: of a source."""
        self._batches = batches
        self._asked = threading.Semaphore(0)
        self._taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()

    def ask(self) -> None:
        """Asks for the next batch, which gives the one before back."""
        self._asked.release()

    def wait(self, seconds: float) -> Any:
        """Returns the batch that was asked for; None if it is not there in time, or never will."""
        try:
            return self._taken.get(timeout=seconds)
        except queue.Empty:
            return None

    def run(self) -> None:
        """Takes batches until the source or `close` ends it."""
        batches = self._batches()
        while self._asked.acquire() and not self._closed.is_set():
            batch = next(batches, None)
            if batch is None:
                return
            self._taken.put(batch)

    def close(self) -> None:
        """Ends both waits here. May be called again."""
        self._closed.set()
        self._asked.release()
        self._taken.put(None)
