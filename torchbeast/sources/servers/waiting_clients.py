# SPDX-License-Identifier: Apache-2.0
"""How many clients wait to be accepted by this process, at a port of TCP."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

# Of struct tcp_info in linux/tcp.h: for a socket that listens, the kernel puts there how many
# connections are established that nobody has accepted yet.
_UNACKED = struct.Struct("=24xI")


class WaitingClients:
    """Counts the connections that nobody has accepted yet, where this process listens already."""

    def __init__(self, port: int) -> None:
        self._listeners = [found for found in _sockets() if _listens_at(found, port)]

    def count(self) -> int:
        return sum(_waiting(listener) for listener in self._listeners)


def nobody_is_accepted(counts: Sequence[int]) -> bool:
    """Returns whether clients waited in vain all the time.

    counts: of WaitingClients, in order. It falls whenever one is accepted, also if others come.
    """
    return counts[0] > 0 and all(before <= after for before, after in pairwise(counts))


def _sockets() -> Iterator[socket.socket]:
    """Yields the sockets of this process, each by another descriptor."""
    # All before the first copy, which may get the number of the folder that was listed.
    for number in [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(int(name))]:
        with suppress(OSError):  # closed by another thread
            yield socket.socket(fileno=os.dup(number))


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def _listens_at(found: socket.socket, port: int) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    if (
        is_tcp
        and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        and found.getsockname()[1] == port
    ):
        return True
    found.close()
    return False


def _waiting(listener: socket.socket) -> int:
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.size)
    (count,) = _UNACKED.unpack(info)
    return int(count)
