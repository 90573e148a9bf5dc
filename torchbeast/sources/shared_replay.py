# SPDX-License-Identifier: Apache-2.0
"""Starts a replay that several agents share, for as long as a `with` block.

    with serving(folder) as served:
        ...                                 agents run with --replay_service {served.address}
        if served.failure is not None: ...  it has died, and its agents end

The replay is a process of its own: agents may die, it goes on; it dies, or its parent does, and the
agents end with a checkpoint. It takes its memory when the first agent joins.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchbeast.errors import RunError, UsageError
from torchbeast.processes.child_process import ChildProcess, end_all

_START_S = 60.0
_LONGEST_PATH = 107  # bytes, of a Unix socket's
_MODULE = "torchbeast.sources.sharing.service_main"


class Served:
    """A shared replay that was started.

    address: for --replay_service. pid: its process. failure: how it died; None while it lives.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.pid = 0
        self.failure: Exception | None = None


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Starts a shared replay on this machine, and ends it with the block.

    folder: for its socket; only the user should have access to it. If it is missing it is made, and
    removed in the end, also when this process is killed.

    Raises UsageError when the folder's name is too long, and RunError when the process does not
    start. The process ends by itself when this one dies.
    """
    path = folder.absolute() / "replay.sock"
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise UsageError(
            f"{path} has {length} bytes, but the path of a socket at most {_LONGEST_PATH}: choose "
            "a shorter folder"
        )
    is_new = not folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_dir():
        raise UsageError(f"{path} is where the socket belongs, but there is a folder: remove it")
    path.unlink(missing_ok=True)  # of a process that was killed
    served = Served(str(path))
    try:
        with _started(path, served, is_new):
            yield served
    finally:  # unless the process did
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextmanager
def _started(path: Path, served: Served, removes_folder: bool) -> Iterator[None]:
    """Runs the process for as long as the block, which begins once agents can connect."""
    first: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def note_end(error: Exception) -> None:
        served.failure = error
        first.put(error)

    arguments = {"path": str(path), "removes_folder": removes_folder}
    child = ChildProcess("shared replay", _MODULE, arguments, lambda _: first.put(None), note_end)
    try:
        _raise_first(first)
        served.pid = child.pid
        yield
    finally:
        end_all([child])


def _raise_first(first: queue.SimpleQueue[Exception | None]) -> None:
    """Waits until the process says that it serves; raises what it says instead."""
    try:
        error = first.get(timeout=_START_S)
    except queue.Empty:
        error = RunError(f"the shared replay has not started within {_START_S:g} s")
    if error is not None:
        raise error
