# SPDX-License-Identifier: Apache-2.0
"""The door to which hosts dial in, beside the learner.

Whoever connects is a stranger until it has sent the token, and with --tls_client_ca has shown its
certificate; it has ten seconds for that, and there are bounds for the number of strangers, of
hosts, of connections and of bytes. Where there are too many, the one that has waited longest makes
room, so that idle strangers do not shut out hosts. No connection waits for another one.
"""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import (
    BANNER,
    END,
    HANDSHAKE_S,
    Hello,
    HostHello,
    LaterError,
    RefusedError,
    SpareHello,
    has_token,
    parse_hello,
)
from torchbeast.sources.tunnel.place import Place
from torchbeast.sources.tunnel.time_limit import within

_log = logging.getLogger("torchbeast.door")

MOST_HOSTS = 256
"""Hosts that a door knows at once."""

_FORGOTTEN_S = 120.0  # without a host, after which another may have its place; see visitors.py
_MOST_STRANGERS = 256  # beside one for each server of the hosts at the same address
_MOST_STRANGERS_OF_ONE = 128  # address; many hosts may be behind one
_IPV6_NETWORK = 64  # bits of an address; whoever has one IPv6 address has 2**64
_UNHURRIED_S = 2.0  # after which a stranger makes room for another one
_PAUSE_S = 0.1  # when the system accepts no connection
_WRONG_TOKEN = "this learner admits only hosts with its token: give the same --token_file"


@dataclass(frozen=True)
class _Stranger:
    """A connection that has not shown its token yet."""

    place: str  # its origin; see `_origin`
    since: float


@dataclass(frozen=True)
class Visit:
    """A host has come or gone; `addresses` are those of its servers for the learner."""

    label: str
    addresses: Sequence[str]
    is_here: bool
    why: str = ""  # it has gone


class Door:
    """Admits hosts and relays between them and the learner. For one event loop."""

    def __init__(
        self,
        folder: Path,
        tls: ssl.SSLContext | None,
        token: str,
        on_visit: Callable[[Visit], None],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Makes a door that nobody can reach yet.

        folder: for the Unix sockets; only this user can enter it.
        tls: None: plain TCP. token: "": none is wanted.
        """
        self._folder, self._tls, self._token = folder, tls, token
        self._on_visit = on_visit
        self._handshake_s = handshake_s
        self._places: dict[str, Place] = {}
        self._numbers = itertools.count()  # of sockets; none is used twice
        self._strangers: dict[asyncio.Task[None], _Stranger] = {}  # the first to come first
        self._servers: collections.Counter[str] = collections.Counter()  # of hosts, by `_origin`
        self._tasks: set[asyncio.Task[None]] = set()
        self._entering = asyncio.Lock()  # one host after the other takes a place

    async def accept(self, listener: socket.socket) -> None:
        """Admits whoever connects, until it is cancelled. listener: does not block."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, peer = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors are left, or the peer has gone again
                _log.info("no connection was accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if not self._has_room(peer[0]):
                connected.close()
                continue
            self._start(connected, peer[0])

    def tell(self, label: str, sentence: str) -> None:
        """Tells a host a sentence, if it is here."""
        if (place := self._places.get(label)) is not None:
            place.tell(sentence)

    def say_ended(self) -> None:
        """Tells all hosts that the learner has ended."""
        for place in self._places.values():
            place.say_ended()

    def close(self) -> None:
        """Ends everything and removes the sockets."""
        for task in self._tasks:
            task.cancel()
        for place in self._places.values():
            place.close()

    def _has_room(self, peer: str) -> bool:
        """Returns whether one more stranger may come, after another one left if need be.

        One for each server of the hosts at its address always may: a host that is here has as many
        connections in reserve.
        """
        place = _origin(peer)
        strangers = collections.Counter(known.place for known in self._strangers.values())
        others = strangers - self._servers  # beyond those of hosts
        if strangers[place] < self._servers[place]:
            return True
        if others[place] >= _MOST_STRANGERS_OF_ONE:
            return self._drop_first({place})
        if others.total() >= _MOST_STRANGERS:
            return self._drop_first(others.keys())
        return True

    def _drop_first(self, places: Collection[str]) -> bool:
        """Drops the first stranger that came from one of these places, as `_drop`."""
        found = (task for task, known in self._strangers.items() if known.place in places)
        return self._drop(next(found))

    def _drop(self, task: asyncio.Task[None]) -> bool:
        """Drops a stranger; returns false for one that may only be slow."""
        if time.monotonic() - self._strangers[task].since < _UNHURRIED_S:
            return False
        del self._strangers[task]
        task.cancel()
        return True

    def _start(self, connected: socket.socket, peer: str) -> None:
        task = asyncio.get_running_loop().create_task(self._receive(connected, peer))
        self._strangers[task] = _Stranger(_origin(peer), time.monotonic())
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._tasks.discard(task)

    async def _receive(self, connected: socket.socket, peer: str) -> None:
        """Serves one connection of TCP to the end of its conversation."""
        connection = Connection()
        try:
            hello = await within(self._handshake_s + 1.0, self._hello(connected, connection))
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            _log.info("a connection of %s was refused: %r", peer, error)
            connection.close()
            return
        except asyncio.CancelledError:  # it made room, or the door is closed
            connection.abort()
            raise
        finally:
            self._strangers.pop(_this_task(), None)
        try:
            await self._admit(hello, connection, peer)
        except RefusedError as error:
            connection.send(b"refused " + str(error).encode())
            connection.close()
        except LaterError as error:
            connection.send(b"later " + str(error).encode())
            connection.close()

    async def _hello(self, connected: socket.socket, connection: Connection) -> Hello:
        """Lets a stranger in; raises OSError or ValueError for one that does not get in."""
        loop = asyncio.get_running_loop()
        timeout = None if self._tls is None else self._handshake_s
        await loop.connect_accepted_socket(
            lambda: connection, connected, ssl=self._tls, ssl_handshake_timeout=timeout
        )
        connection.send(BANNER)
        if not has_token(await connection.line(), self._token):
            connection.send(b"refused " + _WRONG_TOKEN.encode())
            raise ValueError("it does not have the token")
        return parse_hello(await connection.line())

    async def _admit(self, hello: Hello, connection: Connection, peer: str) -> None:
        if isinstance(hello, HostHello):
            await self._admit_host(hello, connection, peer)
        elif isinstance(hello, SpareHello):
            self._admit_spare(hello, connection)
        else:
            for place in self._places.values():
                connection.send(_told(place))
            connection.send(END)
            connection.close()

    async def _admit_host(self, hello: HostHello, control: Connection, peer: str) -> None:
        async with self._entering:
            place = await self._enter(hello, control)
        control.send(f"admitted {place.label}".encode())
        self._on_visit(Visit(place.label, place.addresses, True))
        servers = collections.Counter({_origin(peer): hello.servers})
        self._servers += servers
        try:
            why = await place.attend(control)
        finally:
            self._servers -= servers
        if place.is_held_by(control):
            place.leave()
            self._on_visit(Visit(place.label, place.addresses, False, why))
        control.close()

    async def _enter(self, hello: HostHello, control: Connection) -> Place:
        place = self._place_for(hello)
        try:
            await place.enter(hello, control)
        except OSError as error:
            why = f"the learner's machine cannot create a socket: {error.strerror or error}"
            self._on_visit(Visit(place.label, place.addresses, False, why))
            raise LaterError(why) from None
        return place

    def _place_for(self, hello: HostHello) -> Place:
        """Returns the place of a host: that of its process, of its name, or a new one."""
        own = [place for place in self._places.values() if place.id == hello.id]
        if own:
            return own[0]
        labels = (hello.name, *(f"{hello.name}-{i}" for i in range(2, MOST_HOSTS)))
        for label in labels:
            place = self._places.get(label)
            if place is None:
                return self._new_place(label)
            if place.may_be_taken_by(hello):
                return place
        raise LaterError("there are too many hosts of this name")

    def _new_place(self, label: str) -> Place:
        if len(self._places) >= MOST_HOSTS:
            self._forget_a_host()
        return self._places.setdefault(label, Place(label, self._folder, self._numbers))

    def _forget_a_host(self) -> None:
        """Gives up the place of the host that has been away longest."""
        long_ago = time.monotonic() - _FORGOTTEN_S
        away = [place for place in self._places.values() if not place.id and place.since < long_ago]
        if not away:
            raise LaterError(f"the learner has its {MOST_HOSTS} hosts")
        longest = min(away, key=lambda place: place.since)
        longest.close()
        del self._places[longest.label]

    def _admit_spare(self, hello: SpareHello, spare: Connection) -> None:
        for place in self._places.values():
            if place.id == hello.id and hello.server < len(place.addresses):
                place.servers[hello.server].offer(spare)
                return
        raise LaterError("its host is not here")


def _origin(peer: str) -> str:
    """Returns the unit that connections are limited by: an IPv4 address, or an IPv6 network."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK), strict=False))


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _told(place: Place) -> bytes:
    """Returns the line about a place for whoever asks for the status."""
    state = "here" if place.id else "away"
    age = time.monotonic() - place.since
    return f"{place.label} {state} {len(place.addresses)} {place.relayed} {age:.0f}".encode()
