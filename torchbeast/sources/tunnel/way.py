# SPDX-License-Identifier: Apache-2.0
"""The way to a door: its address, and the TLS and token with which one gets in."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl

from torchbeast.errors import UsageError
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.handshake import client_tls, explain
from torchbeast.sources.servers.own_certificate import check_times
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import (
    BANNER,
    OTHER_PROGRAM,
    RefusedError,
    check_banner,
    token_line,
)

_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NEXT_ADDRESS_S = 0.25  # of a name is tried too, if one has not answered; as RFC 8305 advises
_LINE_S = 5.0  # in which the first line is whole once it has begun


class Way:
    """How to reach one door. It has no state, so any thread may use it.

    The files are read again for each connection, so renewed ones are used from then on.
    """

    def __init__(self, door: str, files: LearnerSecurityConfig) -> None:
        """Checks the files. door: HOST:PORT, or NAME@HOST:PORT with the name in its certificate.

        Raises UsageError for files that cannot be used.
        """
        self.door, self._files = door, files
        self._read()
        where, self._port = host_and_port(door)
        name, _, host = where.rpartition("@")
        self._host, self._name = host.strip("[]"), (name or host).strip("[]")

    async def greet(self, connection: Connection) -> None:
        """Connects, and sends the token once a door has answered.

        Raises OSError or ValueError if nothing does, or the files cannot be used at this moment,
        as while they are replaced; RefusedError if something else answers.
        """
        tls, token = await asyncio.to_thread(self._read)
        transport = await self._connect(connection, tls)
        tls_here = transport.get_extra_info("ssl_object")
        if tls_here is not None and tls_here.selected_alpn_protocol() is not None:
            raise RefusedError(OTHER_PROGRAM)
        check_banner(await _first_line(connection))
        connection.send(token_line(token))

    def explain(self) -> None:
        """Raises RunError or UsageError if waiting does not help to reach the door; may block for
        seconds. Files that cannot be used are not explained: `greet` does it.
        """
        try:
            tls, _ = self._read()
        except (UsageError, OSError):
            return
        explain(self.door, self._files, tls, of_door=True)

    def _read(self) -> tuple[ssl.SSLContext, str]:
        """Returns the TLS and the token in the files; raises UsageError if they cannot be used."""
        from torchbeast.sources.servers.credentials import learner_credentials, read_token

        learner_credentials(self._files)  # says what is wrong with them
        check_times(self._files)
        token = self._files.token_file
        return client_tls(self._files), "" if token is None else read_token(token)

    async def _connect(self, connection: Connection, tls: ssl.SSLContext) -> asyncio.Transport:
        """Connects to the first address of the name that answers."""
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: connection,
                self._host,
                self._port,
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
                ssl=tls if self._files.has_tls else None,
                server_hostname=self._name if self._files.has_tls else None,
            )
        except socket.gaierror as error:  # its numbers are not those of `errno`
            raise ConnectionError(error.strerror) from None
        return transport


def reason(error: Exception, seconds: float) -> str:
    """Says why an attempt to reach a door failed. seconds: for which it waited at most."""
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {seconds:g} s"
    # asyncio puts the errors of all addresses of a name into the text of one.
    numbers = {int(number) for number in _ERRNO.findall(str(error))}
    if numbers == {errno.ECONNREFUSED}:
        return "nobody listens there now"
    return ", ".join(map(os.strerror, sorted(numbers))) or str(error) or type(error).__name__


async def _first_line(connection: Connection) -> bytes:
    """Returns what the other end says first; raises RefusedError if that is not a door's line.

    Other programs may begin with bytes that never become a line, such as gRPC without TLS.
    """
    line = asyncio.ensure_future(connection.line())
    try:
        done, _ = await asyncio.wait({line}, timeout=_LINE_S)
        if not done and not BANNER.startswith(connection.head):
            raise RefusedError(OTHER_PROGRAM)
        return await line
    finally:
        line.cancel()
