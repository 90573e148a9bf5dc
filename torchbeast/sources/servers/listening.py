# SPDX-License-Identifier: Apache-2.0
"""Where programs on this machine listen, and why they cannot.

As for gRPC, a name stands for all its addresses, and 0.0.0.0 or [::] for all of the machine, IPv4
and IPv6.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torchbeast.errors import UsageError
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.hosts import reason, resolved
from torchbeast.sources.servers.own_sockets import listened_at

_ALL = ("0.0.0.0", "::")
_BACKLOG = 512
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of an address, of IPv6

_Place = tuple[int, tuple[Any, ...]]  # family and address of a socket


def listeners(address: str) -> list[socket.socket]:
    """Returns sockets that listen at HOST:PORT and do not block; raises UsageError if none can."""
    return _bound(address, listen=True)


def check_free(addresses: Sequence[str]) -> None:
    """Raises UsageError if a server could not listen at one of these addresses."""
    for address in addresses:
        for probe in _bound(address):
            probe.close()


def check_listens(address: str) -> None:
    """Raises UsageError if another program listens at one of the addresses that HOST:PORT stands
    for; this process must listen at the others.

    gRPC is content with some of the addresses, such as 0.0.0.0 without [::], if another program has
    taken the port at the rest since it was found to be free. It also leaves out IPv6 where that is
    switched off, though a socket can be bound to [::] even there: that is no fault.

    Raises OSError if the sockets of this process cannot be listed.
    """
    host, port = host_and_port(address)
    has = listened_at(port)
    for family, name in _places(host, port):
        if name[0] not in has:
            _check_not_taken(address, family, name)


def _check_not_taken(address: str, family: int, name: tuple[Any, ...]) -> None:
    """Raises UsageError if another program listens at the family's address `name`."""
    try:
        _bind(family, name, listen=False).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(_cannot_listen(address, name[1], error)) from None


def _bound(address: str, listen: bool = False) -> list[socket.socket]:
    """Returns a socket for each address of the machine that HOST:PORT stands for."""
    host, port = host_and_port(address)
    with ExitStack() as on_failure:
        found, missing = [], OSError(errno.EADDRNOTAVAIL, "")
        for family, name in _places(host, port):
            try:
                found.append(on_failure.enter_context(_bind(family, name, listen)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise UsageError(_cannot_listen(address, port, error)) from None
                missing = error
        if not found:
            raise UsageError(_cannot_listen(address, port, missing))
        on_failure.pop_all()
        return found


def _places(host: str, port: int) -> list[_Place]:
    if host.strip("[]") in _ALL:
        return [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port))]
    return list(dict.fromkeys((found[0], found[4]) for found in resolved(host, port)))


def _bind(family: int, name: tuple[Any, ...], listen: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own
        bound.bind(name)
        if listen:  # which another program may have begun since
            bound.listen(_BACKLOG)
            bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _cannot_listen(address: str, port: int, error: OSError) -> str:
    """Returns the sentence for an address at which nothing can listen."""
    if error.errno == errno.EADDRINUSE:
        why = f"another program uses port {port}: end it, or choose another port"
    elif error.errno in _NOT_HERE:
        why = "that is no address of this machine: give one of its own, or 0.0.0.0 for all"
    elif error.errno == errno.EACCES:
        why = f"port {port} is reserved for the administrator: choose one above 1023"
    else:
        why = f"{reason(error)}: choose another address"
    return f"cannot listen at {address}: {why}"
