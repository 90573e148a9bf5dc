# SPDX-License-Identifier: Apache-2.0
"""Threads for tests, ordered by events and never by time:

>>> consumer = Background(next, queue)
>>> consumer.wait_until_blocked()  # now it waits inside the core
>>> queue.enqueue(item)
>>> consumer.result()  # or raises what next(queue) raised
"""

from __future__ import annotations

import fcntl
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SOON = 30.0  # seconds; only a test that fails waits as long
# The numbers of system calls on x86-64 and on ARM.
_FUTEX = {"202", "98"}
_FCNTL = {"72", "25"}


def wait_for(condition: Callable[[], Any], timeout: float = SOON) -> None:
    """Waits until `condition` holds; fails if that takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.001)


@contextmanager
def a_fork() -> Iterator[None]:
    """Lets a fork of this process live during the block, like the caller's Pool or DataLoader."""
    context = multiprocessing.get_context("fork")
    begun, ended = context.Event(), context.Event()
    fork = context.Process(target=lambda: (begun.set(), ended.wait()))
    fork.start()
    try:
        assert begun.wait(SOON)
        yield
        assert fork.is_alive()
    finally:
        ended.set()
        fork.join()


class Background(Generic[T]):
    """A call in its own thread."""

    def __init__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> None:
        self._call = lambda: function(*args, **kwargs)
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, timeout: float = SOON) -> T:
        """Returns the result of the call, or raises its exception."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call did not end"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait_until_blocked(self) -> None:
        """Returns once the call waits in the core, or for a lock of a file, without a time limit.

        Linux tells which system call a thread is in. To wait for the interpreter lock is another
        thing: Python does that with a time limit.
        """
        task = Path(f"/proc/self/task/{self._thread.native_id}/syscall")
        if not task.exists():
            import pytest  # which the programs of tests, that have no skips, need not import

            pytest.skip("this system does not tell what a thread waits for")
        wait_for(lambda: self.ended or _waits_without_limit(task.read_text()))
        assert not self.ended, "the call did not wait"

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        del self._call  # nothing of the test stays alive in a thread that has ended


def _waits_without_limit(syscall: str) -> bool:
    """Returns whether a line of /proc/*/syscall is a futex call without a limit (argument 4), or
    waits for a lock of a file.
    """
    fields = syscall.split()
    if fields[0] in _FCNTL:
        return fields[2] == hex(fcntl.F_SETLKW)
    return fields[0] in _FUTEX and fields[4] == "0x0"
