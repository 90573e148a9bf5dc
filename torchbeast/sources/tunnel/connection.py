# SPDX-License-Identifier: Apache-2.0
"""One end of a connection: it reads lines at first, and is later joined with another one.

Joined connections relay bytes and end together. Whichever cannot send as fast as the other receives
stops the other's reading, so a slow reader costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

from torchbeast.sources.tunnel.messages import MAX_LINE

_MOST_UNREAD = 64 << 10  # bytes that may wait to be read as lines
_FLUSH_S = 5.0  # for what is left to send when a connection is closed
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 3  # the kernel's keepalive, which also keeps a NAT's entry
_USER_TIMEOUT_MS = 25_000  # for which sent bytes may stay without an answer


class Connection(asyncio.Protocol):
    """A connection of an event loop, whose thread alone uses it."""

    _transport: asyncio.Transport | None = None
    _other: Connection | None = None
    _arrival: asyncio.Future[None] | None = None
    _is_full = False  # more waits to be sent than should

    def __init__(self) -> None:
        self._unread = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def unread(self) -> int:
        """Bytes that were received and neither read as lines nor relayed."""
        return len(self._unread)

    @property
    def head(self) -> bytes:
        """What was received of a line that is not whole yet."""
        return bytes(self._unread)

    @property
    def is_open(self) -> bool:
        """Whether something can be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self.lost.done()

    def send(self, line: bytes) -> None:
        """Sends a line; a no-op on a connection that has ended.

        Aborts a connection whose other end does not read the few lines that there are.
        """
        if not self.is_open or self._transport is None:
            return
        self._transport.write(line + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_UNREAD:
            self.abort()

    async def line(self) -> bytes:
        """Waits for the next line; raises ConnectionError at the end, ValueError if it is too long.

        One task at a time.
        """
        while (end := self._unread.find(b"\n", 0, MAX_LINE + 1)) < 0:
            if len(self._unread) > MAX_LINE:
                raise ValueError(f"a line has more than {MAX_LINE} bytes")
            if self.lost.done():
                raise ConnectionError("the other end closed the connection")
            await self._next_arrival()
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        if self._transport is not None and len(self._unread) <= _MOST_UNREAD:
            self._transport.resume_reading()
        return line

    def join(self, other: Connection) -> None:
        """Relays between two connections from now on, until either ends."""
        self._other, other._other = other, self
        for one in (self, other):
            if one._transport is None or not self.is_open or not other.is_open:
                self.close()
                other.close()
                return
        for one in (self, other):
            one._relay_unread()

    def close(self) -> None:
        """Ends the connection once everything has been sent, or after a few seconds."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(_FLUSH_S, self.abort)

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None and not self.lost.done():
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other._relay(data)
            return
        self._unread += data
        if len(self._unread) > _MOST_UNREAD and self._transport is not None:
            self._transport.pause_reading()
        self._arrived()

    def pause_writing(self) -> None:
        self._is_full = True
        if self._other is not None and self._other._transport is not None:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)
        self._arrived()
        if self._other is not None:
            self._other.close()

    # ---

    def _relay(self, data: bytes | bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _relay_unread(self) -> None:
        """Relays what came before the connections were joined."""
        assert self._other is not None and self._transport is not None
        if self._unread:
            self._other._relay(bytes(self._unread))
            self._unread.clear()
        if not self._other._is_full:  # else the other one's resume_writing does it
            self._transport.resume_reading()

    def _arrived(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _next_arrival(self) -> None:
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None


def _watch(connected: Any) -> None:
    """Lets the kernel notice a TCP peer that is gone without a word, and send at once."""
    if connected is None or connected.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):  # it has ended by now
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
