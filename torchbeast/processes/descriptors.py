# SPDX-License-Identifier: Apache-2.0
"""The descriptors of a process: its open files and connections, whose number is limited, and its
standard streams, whose terminal may go away: a window, a session of ssh.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import stat
import threading
from collections.abc import Iterator

_WHERE_NO_LIMIT_IS = 10_240
_STREAMS = (0, 1, 2)


def allow_descriptors(most: int | None = None) -> None:
    """Raises this process's limit as far as its user may, up to `most`; None: as far as it goes, or
    to 10,240 where it has no end, which macOS takes for the most that it grants.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most is None:
        most = _WHERE_NO_LIMIT_IS if hard == resource.RLIM_INFINITY else hard
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or (wanted != resource.RLIM_INFINITY and soft >= wanted):
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_lock = threading.Lock()
_users = 0  # of limit_kept
_before = 0  # the limit when the first of them began


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """Puts this process's limit back at the end, as far as its user still may.

    Where such blocks overlap, the last one to end puts back the limit that the first one found.
    """
    global _users, _before
    with _lock:
        if not _users:
            _before = allowed_descriptors()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                with contextlib.suppress(OSError, ValueError):
                    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (_before, hard))


def allowed_descriptors() -> int:
    """Returns the limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def leave_lost_terminal(pipes: bool = False) -> None:
    """Lets what is printed to a terminal that is gone vanish, instead of failing.

    Nothing is locked, so that a handler of signals may call it.

    pipes: also what is printed to a pipe that nobody reads any more.
    """
    lost = [stream for stream in _STREAMS if is_lost(stream, pipes)]
    if not lost:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in lost:
        os.dup2(nothing, stream)
    os.close(nothing)


def is_lost(stream: int, pipes: bool) -> bool:
    """Returns whether a stream leads to a terminal that is gone; pipes: or to no reader."""
    poll = select.poll()
    poll.register(stream, 0)  # reports the absence of the other end only
    gone = any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))
    return gone and (pipes or stat.S_ISCHR(os.fstat(stream).st_mode))
