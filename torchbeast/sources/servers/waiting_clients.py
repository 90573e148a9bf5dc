# SPDX-License-Identifier: Apache-2.0
"""Clients that wait to be accepted by this process, at a port of TCP."""

from __future__ import annotations

import os
import socket
import struct
import sys

from torchbeast.sources.servers.own_sockets import listens, tcp_sockets

# Of struct tcp_info in linux/tcp.h: for a socket that listens, the kernel puts there how many
# connections are established that nobody has accepted yet.
_UNACKED = struct.Struct("=24xI")


def can_be_watched(address: str) -> bool:
    """Returns whether clients that wait at a server's address can be counted: at TCP, on Linux."""
    return sys.platform == "linux" and not address.startswith("unix:")


class WaitingClients:
    """Watches the clients that nobody has accepted yet, where this process listens already."""

    def __init__(self, port: int) -> None:
        """Finds where this process listens; raises OSError if its sockets cannot be listed."""
        found = list(tcp_sockets(port))
        self._port, self._listeners = port, [each for each in found if listens(each)]
        self._accepted: set[int] = set()
        for each in found:
            if each not in self._listeners:
                each.close()

    def count(self) -> int:
        """Returns how many there are."""
        return sum(_waiting(listener) for listener in self._listeners)

    def wait_in_vain(self) -> bool:
        """Returns whether there are some, and nobody was accepted since the last call.

        Not by their number, which a flood keeps the same however many are accepted. One who was
        accepted and has left again between two calls is missed. Raises OSError if that cannot be
        known, because all descriptors are in use.
        """
        is_waiting = self.count() > 0
        before, self._accepted = self._accepted, _connections(self._port) if is_waiting else set()
        return is_waiting and self._accepted <= before


def _connections(port: int) -> set[int]:
    """Returns the numbers that the kernel has for connections to the port."""
    numbers = set()
    for found in tcp_sockets(port):
        with found:
            if not listens(found):
                numbers.add(os.fstat(found.fileno()).st_ino)
    return numbers


def _waiting(listener: socket.socket) -> int:
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.size)
    (count,) = _UNACKED.unpack(info)
    return int(count)
