# SPDX-License-Identifier: Apache-2.0
"""Runs a door in a thread of a test, and speaks to it from the test's thread by plain sockets.

The words here are written out, not taken from the code: they are the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from background import SOON

from torchbeast.sources.tunnel.door import Door, Visit

TOKEN = b"a-token-of-this-test"
ID = b"0123456789abcdef" * 2
OTHER_ID = b"fedcba9876543210" * 2
SERVED = b"00112233445566aa"


class OpenDoor:
    """A door at a port of the loopback."""

    def __init__(
        self, folder: Path, tls: ssl.SSLContext | None, handshake_s: float, port: int
    ) -> None:
        self.folder = folder
        self.visits: queue.Queue[Visit] = queue.Queue()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.door = self._run(self._make(tls, handshake_s)).result(SOON)
        self._accepting = self._run(self.door.accept(self._listener))

    def visit(self) -> Visit:
        """Waits for the next host that comes or goes."""
        return self.visits.get(timeout=SOON)

    def call(self, function: Any) -> Any:
        """Calls a function in the thread of the door."""

        async def body() -> Any:
            return function()

        return self._run(body()).result(SOON)

    def stop_listening(self) -> None:
        self._accepting.cancel()
        self.call(lambda: None)
        self._listener.close()

    def close(self) -> None:
        self.stop_listening()
        self.call(self.door.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SOON)

    async def _make(self, tls: ssl.SSLContext | None, handshake_s: float) -> Door:
        return Door(self.folder, tls, TOKEN.decode(), self.visits.put, handshake_s)

    def _run(self, body: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(body, self.loop)


@contextlib.contextmanager
def opened(
    folder: Path, tls: ssl.SSLContext | None = None, handshake_s: float = 10.0, port: int = 0
) -> Iterator[OpenDoor]:
    door = OpenDoor(folder, tls, handshake_s, port)
    try:
        yield door
    finally:
        door.close()


class Peer:
    """Somebody who connects to the door."""

    def __init__(
        self,
        port: int,
        tls: ssl.SSLContext | None = None,
        timeout: float = SOON,
        source: str = "127.0.0.1",
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout, (source, 0))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *lines: bytes) -> None:
        self.socket.sendall(b"".join(line + b"\n" for line in lines))

    def line(self) -> bytes:
        """Returns the next line without its end; b"" once the door has closed the connection."""
        said = b""
        while not said.endswith(b"\n"):
            byte = self.receive(1)
            if not byte:
                return said
            said += byte
        return said[:-1]

    def receive(self, count: int) -> bytes:
        try:
            return self.socket.recv(count)
        except ConnectionResetError:
            return b""

    def exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            chunk = self.receive(count - len(received))
            assert chunk, f"it ended after {len(received)} of {count} bytes"
            received += chunk
        return received

    def is_closed(self) -> bool:
        """Waits for bytes or the end, and returns whether it was the end."""
        return not self.receive(1)


def host(
    door: OpenDoor,
    name: bytes = b"a",
    id: bytes = ID,
    servers: int = 1,
    served: bytes = SERVED,
) -> Peer:
    """Returns the connection of a host that was admitted."""
    peer = Peer(door.port)
    assert peer.line() == b"torchbeast door 3"
    peer.say(b"token " + TOKEN, b"host %s %s %d %s" % (name, id, servers, served))
    assert peer.line().startswith(b"admitted ")
    return peer


def spare(door: OpenDoor, server: int = 0, id: bytes = ID) -> Peer:
    """Returns a connection for a server of a host."""
    peer = Peer(door.port)
    assert peer.line() == b"torchbeast door 3"
    peer.say(b"token " + TOKEN, b"spare %s %d" % (id, server))
    return peer


def learner(address: str) -> socket.socket:
    """Connects as the learner does."""
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(SOON)
    connected.connect(address.removeprefix("unix:"))
    return connected
