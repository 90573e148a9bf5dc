# SPDX-License-Identifier: Apache-2.0
"""Serves a shared replay over a Unix socket, in one thread.

    agent --- request ---> [ connection ] --> SharedReplay --> answer, when the socket takes it
          <-- region --->

Nothing here waits for a single agent: sockets do not block, and of each agent one request is in
memory, whose size was checked before. An agent that sends anything else, or that ends, is cut off;
the others notice nothing. Requests are answered in the order in which they are complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchbeast.core.checks import require
from torchbeast.core.storages.chunk_ring import row_bytes
from torchbeast.sources.sharing.joining import Joining
from torchbeast.sources.sharing.messages import Message, Receiver, arrays_of, number, packed
from torchbeast.sources.sharing.regions import Region, region_bytes
from torchbeast.sources.sharing.shared_replay import AGAIN, SharedReplay

_log = logging.getLogger("torchbeast.replay_service")

_MOST_CONNECTIONS = 200  # each has up to three open files
_WAITING = 100  # connections that are not accepted yet
_WITH_DESCRIPTOR, _WITHOUT = b"+", b"-"  # before the first answer


class Ends(Protocol):
    """A file that becomes readable when the service is to end."""

    def fileno(self) -> int:
        """Returns its descriptor."""


class Service:
    """A replay at a socket. `run` serves it until it is told to end.

    Thread safety: none. replay: what is served.
    """

    def __init__(self, path: Path, free_memory: Callable[[], int | None]) -> None:
        """Opens the socket, which only the user can connect to.

        free_memory: see SharedReplay. Raises OSError where there is one already.
        """
        self._path = path
        self.replay = SharedReplay(free_memory)
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(_WAITING)
        self._socket.setblocking(False)

    def run(self, ends: Ends) -> None:
        """Serves agents until `ends` is readable, then removes the socket."""
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._selector.register(ends, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        return
                    key.data()
        finally:
            self.close()

    def close(self) -> None:
        """Removes the socket and ends all connections."""
        self._path.unlink(missing_ok=True)
        for connection in list(self._connections):
            self._end(connection)
        self._socket.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError as error:  # it has gone again, or there are no more descriptors
            _log.warning("no connection was accepted: %s", error)
            return
        if len(self._connections) >= _MOST_CONNECTIONS:
            _log.warning("%d agents are connected: no more are accepted", _MOST_CONNECTIONS)
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._await(connection, selectors.EVENT_READ)

    def _await(self, connection: _Connection, event: int) -> None:
        """Calls `_go_on` when the connection can be read from, or written to."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.socket)
        self._selector.register(connection.socket, event, lambda: self._go_on(connection))

    def _go_on(self, connection: _Connection) -> None:
        """Reads or writes as much as there is. Whatever an agent does ends its connection only."""
        if connection not in self._connections:
            return  # ended by a request that was handled in between
        try:
            if connection.has_to_send:
                is_answered = connection.send()
            elif (message := connection.receive()) is not None:
                connection.answer(self._answer(connection, message))
                is_answered = connection.send()
            else:
                return
            if connection.is_ending and is_answered:
                self._end(connection)
            else:
                event = selectors.EVENT_READ if is_answered else selectors.EVENT_WRITE
                self._await(connection, event)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError as error:
            _log.info("%s has left: %s", connection, error)
            self._end(connection)
        except (OSError, ValueError) as error:
            self._cut_off(connection, str(error))
        except Exception:
            _log.exception("%s is cut off", connection)
            self._end(connection)

    def _cut_off(self, connection: _Connection, why: str) -> None:
        _log.warning("%s: %s", connection, why)
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.region = None  # its memory is freed at once, not with the connection's garbage
        if connection.agent is not None:
            self.replay.leave(connection.agent)

    # --- requests

    def _answer(self, connection: _Connection, message: Message) -> list[memoryview]:
        match message.header["do"]:
            case "join":
                return self._join(connection, message.header)
            case "insert":
                return self._insert(connection, message)
        return self._fill(connection, message)

    def _join(self, connection: _Connection, header: Mapping[str, Any]) -> list[memoryview]:
        try:
            joining = Joining.from_json({k: v for k, v in header.items() if k != "do"})
            region = self._region(joining)
            agent = self.replay.join(joining)
        except (ValueError, MemoryError, OSError) as error:
            _log.warning("%s is refused: %s", connection, error)
            connection.is_ending = True
            connection.socket.send(_WITHOUT)
            return packed({"refused": str(error)})
        self._replace(agent)
        connection.joined(joining, agent, region)
        socket.send_fds(connection.socket, [_WITH_DESCRIPTOR], [region.descriptor])
        _log.info("%s joins", connection)
        return packed({"agent": agent, **self._figures()})

    def _region(self, joining: Joining) -> Region:
        self.replay.check_room(region_bytes(joining))
        return Region(joining)

    def _replace(self, agent: int) -> None:
        """Ends an older connection of an agent that joins again."""
        for other in [each for each in self._connections if each.agent == agent]:
            other.agent = None  # it is the new one that leaves
            with contextlib.suppress(OSError):
                other.answer(packed({"ended": AGAIN}))
                other.send()
            self._cut_off(other, AGAIN)

    def _insert(self, connection: _Connection, message: Message) -> list[memoryview]:
        joining, region = connection.joining, connection.region
        assert joining is not None and region is not None and connection.agent is not None
        finals = arrays_of(message.payload, joining.finals(message.header["finals"]))
        arrays = {**region.taken(), "final_observation": tuple(finals)}
        try:
            self.replay.insert(connection.agent, arrays)
        except ValueError as error:
            _log.warning("%s is refused: %s", connection, error)
            return packed({"refused": str(error)})
        return packed(self._figures())

    def _fill(self, connection: _Connection, message: Message) -> list[memoryview]:
        region = connection.region
        assert region is not None and connection.agent is not None
        filled = self.replay.fill(connection.agent, region.filled, message.header["first_walk"])
        if filled is None:
            return packed({"begins": None, **self._figures()})
        count = len(filled.finals[0]) if filled.finals else 0
        answer = {"begins": filled.begins, "finals": count, **self._figures()}
        return packed(answer, filled.finals)

    def _figures(self) -> dict[str, float]:
        return self.replay.figures()._asdict()


_MOST_WALKS = 10**6


class _Connection:
    """One agent's socket, with the request or the answer that is on its way.

    joining, agent, region: None until it has joined.
    """

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.joining: Joining | None = None
        self.agent: int | None = None
        self.region: Region | None = None
        self.is_ending = False  # once the answer is sent
        self._receiver = Receiver(self._payload_of)
        self._unsent: deque[memoryview] = deque()

    def __str__(self) -> str:
        return "an agent" if self.joining is None else f"agent {self.joining.name}"

    def joined(self, joining: Joining, agent: int, region: Region) -> None:
        """Takes note of what is agreed."""
        self.joining, self.agent, self.region = joining, agent, region

    @property
    def has_to_send(self) -> bool:
        """Whether an answer is on its way."""
        return bool(self._unsent)

    def receive(self) -> Message | None:
        """Returns the next request once it is complete; see Receiver."""
        return self._receiver.receive(self.socket)

    def answer(self, pieces: list[memoryview]) -> None:
        """Begins to send an answer."""
        self._unsent.extend(pieces)

    def send(self) -> bool:
        """Sends what the socket takes; returns whether that was all."""
        while self._unsent:
            try:
                count = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            if count < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][count:]
            else:
                self._unsent.popleft()
        return True

    def _payload_of(self, header: Mapping[str, Any]) -> int:
        """Returns the size of the payload that belongs to a request; ValueError if it is none."""
        do = header.get("do")
        if self.joining is None:
            require(do == "join", "an agent must join first")
            return 0
        if do == "insert":
            most = self.joining.unroll_length * self.joining.columns
            return row_bytes(self.joining.finals(number(header, "finals", most)))
        require(do == "fill", f"there is no request {do!r}")
        if header.get("first_walk") is not None:
            number(header, "first_walk", _MOST_WALKS)
        return 0
