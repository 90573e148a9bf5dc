# SPDX-License-Identifier: Apache-2.0
"""The place of a host at the door: a Unix socket for each of its servers, where the learner
connects, and the connections that the host keeps in reserve for it.

Sockets stay while the host is away, and the learner connects there again. A host that comes back
with other servers gets others: what the learner knows of an address is true for good.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchbeast.errors import UsageError
from torchbeast.sources.servers.addresses import MAX_SOCKET_PATH
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import BEAT, ENDED, GO, SILENCE_S, HostHello, told_line
from torchbeast.sources.tunnel.time_limit import within

_MOST_SPARES = 4  # of a server; its host keeps one
_QUIET_S = 12.0  # without a beat, after which another process may take the place
_MOST_BEATS_AT_ONCE, _LEAST_BEAT_S = 10, 1.0  # those of a host that is not hostile are rarer
_BACKLOG = 128
_LEAST_ROOM = 24  # bytes for the name of a socket: a dozen of the label, and a number


class Place:
    """The host of one label, present or away."""

    def __init__(self, label: str, folder: Path, numbers: Iterator[int]) -> None:
        """Makes the place of a host that is away.

        label: part of the names of its sockets, which are in `folder`. numbers: for their names,
        none of which may be used twice.
        """
        self.label = label
        self.id = ""  # of the host that is here; "": it is away
        self.servers: list[ServerDoor] = []
        self.since = time.monotonic()  # it is here, or away
        self._folder = folder
        self._served = (0, "")  # number and fingerprint of the servers
        self._numbers = numbers
        self._control: Connection | None = None
        self._heard = 0.0

    @property
    def addresses(self) -> list[str]:
        """The addresses of its servers for the learner."""
        return [server.address for server in self.servers]

    @property
    def relayed(self) -> int:
        """The number of connections that are relayed now."""
        return sum(len(server.relayed) for server in self.servers)

    def may_be_taken_by(self, hello: HostHello) -> bool:
        """Returns whether the host is away, silent, or the one that asks."""
        return self.id in ("", hello.id) or time.monotonic() - self._heard > _QUIET_S

    async def enter(self, hello: HostHello, control: Connection) -> None:
        """Lets a host in, in place of whatever was left of another; listens for the learner.

        Raises OSError if the system makes no sockets; the host is away then.
        """
        self.leave()
        if self._served != (hello.servers, hello.served):
            await self._replace_servers(hello)
        self.id, self._control = hello.id, control
        self.since = self._heard = time.monotonic()
        for server in self.servers:
            server.is_here = True

    async def _replace_servers(self, hello: HostHello) -> None:
        """Listens at new addresses; raises OSError if the system makes no sockets."""
        self._served = (0, "")
        for server in self.servers:
            server.close()
        self.servers = []
        for _ in range(hello.servers):
            server = ServerDoor(self._folder / self._socket_name())
            self.servers.append(server)
            await server.listen()
        self._served = hello.servers, hello.served

    def _socket_name(self) -> str:
        """Returns a new name, with as much of the label as a Unix socket has room for."""
        end = f".{next(self._numbers)}"
        return self.label[: _room(self._folder) - len(end)] + end

    async def attend(self, control: Connection) -> str:
        """Answers beats until the host is gone; returns why."""
        beats, began = 0, time.monotonic()
        try:
            while await within(SILENCE_S, control.line()) == BEAT:
                beats, self._heard = beats + 1, time.monotonic()
                if beats > _MOST_BEATS_AT_ONCE + (self._heard - began) / _LEAST_BEAT_S:
                    return "it beats too often"
                control.send(BEAT)
            return "it said something that this version does not understand"
        except asyncio.TimeoutError:
            return f"nothing was heard of it for {SILENCE_S:g} s"
        except (ConnectionError, ValueError) as error:
            return str(error)

    def is_held_by(self, control: Connection) -> bool:
        """Returns whether the host of this connection is the one that is here."""
        return self._control is control

    def leave(self) -> None:
        """Ends all connections of the host. May be called again."""
        for server in self.servers:
            server.clear()
        if self._control is not None:
            self._control.abort()
            self.since = time.monotonic()
        self.id, self._control = "", None

    def tell(self, sentence: str) -> None:
        """Tells the host a sentence, if it is here."""
        if self._control is not None:
            self._control.send(told_line(sentence))

    def say_ended(self) -> None:
        """Tells the host that the learner has ended."""
        if self._control is not None:
            self._control.send(ENDED)
            self._control.close()

    def close(self) -> None:
        """Ends all connections and removes the sockets."""
        self.leave()
        for server in self.servers:
            server.close()


class ServerDoor:
    """The learner's side of one server: joins the learner's connections with spare ones."""

    def __init__(self, path: Path) -> None:
        """path: of the Unix socket."""
        self.address = f"unix:{path}"
        self.is_here = False
        self.relayed: set[Connection] = set()  # the learner's ends
        self._path = path
        self._spares: collections.deque[Connection] = collections.deque()
        self._asking: collections.deque[Connection] = collections.deque()
        self._listener: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """Waits for the learner at the socket from now on."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(
            lambda: _Asking(self._asks), str(self._path), backlog=_BACKLOG
        )

    def offer(self, spare: Connection) -> None:
        """Keeps a connection of the host in reserve; the oldest goes if there are too many."""
        self._spares.append(spare)
        if len(self._spares) > _MOST_SPARES:
            self._spares.popleft().abort()
        self._match()

    def clear(self) -> None:
        """Ends all connections: the host has left."""
        self.is_here = False
        for connection in (*self._spares, *self._asking, *self.relayed):
            connection.abort()
        self._spares.clear()
        self._asking.clear()

    def close(self) -> None:
        """Stops listening and removes the socket."""
        self.clear()
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _asks(self, learner: Connection) -> None:
        if not self.is_here:
            learner.abort()  # gRPC tries again, at growing intervals
            return
        self._asking.append(learner)
        self._match()

    def _match(self) -> None:
        """Joins those that wait for each other."""
        while (spare := _first(self._spares)) and (learner := _first(self._asking)):
            self._spares.popleft()
            if spare.unread:  # a host says nothing before it is asked to
                spare.abort()
                continue
            self._asking.popleft()
            self._relay(learner, spare)

    def _relay(self, learner: Connection, spare: Connection) -> None:
        spare.send(GO)
        self.relayed.add(learner)
        learner.lost.add_done_callback(lambda _: self.relayed.discard(learner))
        learner.join(spare)


class _Asking(Connection):
    """A connection of the learner."""

    def __init__(self, on_made: Callable[[Connection], None]) -> None:
        super().__init__()
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._on_made(self)


def check_room(folder: Path) -> None:
    """Raises UsageError if the paths of Unix sockets in the folder would be too long."""
    if _room(folder) < _LEAST_ROOM:
        raise UsageError(
            f"the sockets of hosts that dial in need a folder whose path has at most "
            f"{MAX_SOCKET_PATH - _LEAST_ROOM - 1} bytes, and {folder} has "
            f"{len(os.fsencode(folder))}: give a shorter TMPDIR"
        )


def _room(folder: Path) -> int:
    """Returns how many bytes the name of a Unix socket in the folder may have."""
    return MAX_SOCKET_PATH - len(os.fsencode(folder)) - len("/")


def _first(waiting: collections.deque[Connection]) -> Connection | None:
    """Returns the first that is still open, and drops those before it."""
    while waiting and not waiting[0].is_open:
        waiting.popleft()
    return waiting[0] if waiting else None
