# SPDX-License-Identifier: Apache-2.0
"""The terminal of a program, which may go away while it runs: a window, a session of ssh."""

from __future__ import annotations

import os
import select
import stat

_STREAMS = (0, 1, 2)


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
