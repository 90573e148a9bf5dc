# SPDX-License-Identifier: Apache-2.0
"""The TCP sockets of this process, which gRPC has opened and does not hand out."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress


def tcp_sockets(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process at the port, each by another descriptor."""
    # All before the first copy, which may get the number of the folder that was listed.
    for number in [int(name) for name in os.listdir("/proc/self/fd") if _is_socket(int(name))]:
        with suppress(OSError):  # closed by another thread
            found = socket.socket(fileno=os.dup(number))
            if _is_tcp_at(found, port):
                yield found
            else:
                found.close()


def listens(found: socket.socket) -> bool:
    """Returns whether the socket accepts connections."""
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listened_at(port: int) -> set[str]:
    """Returns the addresses, without the port, at which this process listens there."""
    found: set[str] = set()
    for each in tcp_sockets(port):
        with each:
            if listens(each):
                found |= _reached_at(each)
    return found


def _reached_at(listener: socket.socket) -> set[str]:
    """Returns the socket's address, and that of IPv4 if a socket of IPv6 accepts it as well."""
    host = str(listener.getsockname()[0])
    if listener.family == socket.AF_INET:
        return {host}
    if listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        return {host}
    return {"::", "0.0.0.0"} if host == "::" else {host.removeprefix("::ffff:")}


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def _is_tcp_at(found: socket.socket, port: int) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockname()[1] == port)
