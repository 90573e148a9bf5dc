# SPDX-License-Identifier: Apache-2.0
"""The TCP sockets of this process, which gRPC has opened and does not hand out."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator

_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS
_CLOSED_MEANWHILE = (errno.EBADF, errno.ENOTSOCK)  # by another thread; a file may have its number


def tcp_sockets(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process at the port, each by another descriptor.

    Raises OSError if its descriptors cannot be listed or copied, as when all of them are in use.
    """
    # All before the first copy, which may get the number of the folder that was listed.
    for number in [int(name) for name in os.listdir(_DESCRIPTORS) if _is_socket(int(name))]:
        found = _copy(number)
        if found is None:
            continue
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


def _copy(number: int) -> socket.socket | None:
    """Returns the socket by another descriptor; None if it was closed by another thread."""
    copy = -1
    try:
        copy = os.dup(number)
        return socket.socket(fileno=copy)
    except OSError as error:
        if copy >= 0:
            os.close(copy)
        if error.errno not in _CLOSED_MEANWHILE:
            raise
        return None


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def _is_tcp_at(found: socket.socket, port: int) -> bool:
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    return is_tcp and bool(found.getsockname()[1] == port)
