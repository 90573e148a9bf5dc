# SPDX-License-Identifier: Apache-2.0
"""Where programs on this machine listen, and why they cannot.

As for gRPC, a name stands for all its addresses, and 0.0.0.0 or [::] for all of the machine, IPv4
and IPv6.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from contextlib import ExitStack
from typing import Any

from torchbeast.errors import UsageError
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.hosts import NoAddressError, reason, resolved

_ALL = ("0.0.0.0", "::")
_BACKLOG = 512
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of an address, of IPv6

_Place = tuple[int, tuple[Any, ...]]  # family and address of a socket


def listeners(address: str) -> list[socket.socket]:
    """Returns sockets that listen at HOST:PORT and do not block; raises UsageError if none can."""
    return _bound(address, listen=True)


def check_free(address: str) -> None:
    """Raises UsageError if a server could not listen at all addresses of HOST:PORT."""
    for probe in _bound(address):
        probe.close()


def answers(address: str, seconds: float) -> bool:
    """Returns whether this process's server at HOST:PORT still accepts connections.

    A server has so many seconds to answer the first message of a TLS client; without TLS it speaks
    first. Returns False too if this process has too many open files to open a connection.
    """
    hello = _hello()
    with contextlib.suppress(NoAddressError):
        return all(_answers(*place, hello, seconds) for place in _places(*host_and_port(address)))
    return True


def _answers(family: int, name: tuple[Any, ...], hello: bytes, seconds: float) -> bool:
    """Returns whether the address answers; True if it is another machine's or nobody listens."""
    try:
        with socket.socket(family) as probe:
            probe.settimeout(seconds)
            probe.bind((name[0], 0, *name[2:]))  # fails at an address of another machine
            probe.connect(name)
            probe.sendall(hello)
            probe.recv(1)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def _hello() -> bytes:
    """Returns the first message of a TLS client."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


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
