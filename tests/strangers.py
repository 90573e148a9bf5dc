# SPDX-License-Identifier: Apache-2.0
"""A client of HTTP/2 by hand, which sends as much of a message as the server lets it, and no end.

grpcio would keep a copy of every message. RFC 9113 has the frames, RFC 7541 the headers.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW, _MAX_FRAME = 4, 5  # settings
_STREAM = 1
NO_ERROR = 0
ENHANCE_YOUR_CALM = 11  # an error code that clients of gRPC show as RESOURCE_EXHAUSTED


class UnfinishedCall:
    """A call whose message of `size` bytes is never complete. Used by one thread."""

    def __init__(self, path: str, method: str, size: int) -> None:
        """Connects to a Unix socket and begins the call; method: /SERVICE/METHOD."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._windows = {0: 65_535, _STREAM: 65_535}
        self._initial_window, self._max_frame = 65_535, 16_384
        self._received = b""
        self.is_refused = False
        self.reset: int | None = None  # error code of HTTP/2 with which the server ended it, if so
        self.sent = 0  # bytes of the message
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, _STREAM, _headers(method)))
        self._rest = size
        self._next = b"\0" + struct.pack(">I", size)  # gRPC's prefix of a message

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def send(self, patience_s: float) -> bool:
        """Sends what the server has room for now; returns whether that was anything.

        patience_s: to wait for more room.
        """
        self._hear(patience_s)
        before = self.sent
        with contextlib.suppress(OSError):
            while not self.is_refused and (room := self._room()):
                self._send(room)
                self._hear(0.0)
        return self.sent > before

    def _room(self) -> int:
        return max(0, min(*self._windows.values(), self._max_frame, self._rest - 1))

    def _send(self, room: int) -> None:
        data, self._next = self._next + bytes(room - len(self._next)), b""
        self._socket.settimeout(5.0)
        self._socket.sendall(_frame(_DATA, 0, _STREAM, data))
        self.sent += room
        self._rest -= room
        for stream in self._windows:
            self._windows[stream] -= room

    def _hear(self, patience_s: float) -> None:
        """Takes the frames that have come."""
        self._socket.settimeout(patience_s)
        with contextlib.suppress(BlockingIOError, TimeoutError, ConnectionError):
            while received := self._socket.recv(1 << 16):
                self._received += received
                self._take_frames()
                self._socket.settimeout(0.0)
            self.is_refused = True

    def _take_frames(self) -> None:
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            if len(self._received) < 9 + size:
                return
            self._take(kind, flags, stream, self._received[9 : 9 + size])
            self._received = self._received[9 + size :]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                self._set(*struct.unpack(">HI", payload[at : at + 6]))
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            self.is_refused = True
            if kind == _RST_STREAM and self.reset is None:
                self.reset = int.from_bytes(payload, "big")

    def _set(self, name: int, value: int) -> None:
        if name == _INITIAL_WINDOW:
            self._windows[_STREAM] += value - self._initial_window
            self._initial_window = value
        elif name == _MAX_FRAME:
            self._max_frame = value


def unread_calls(path: str, method: str, number: int) -> socket.socket:
    """Makes calls over a connection whose answers nobody reads, and returns the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
    block = _headers(method)
    for stream in range(1, 2 * number, 2):
        connection.sendall(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, block))
    return connection


def _headers(method: str) -> bytes:
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "a"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()
