# SPDX-License-Identifier: Apache-2.0
"""Clients that wait are counted at one's own port, and a server that accepts nobody is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from background import wait_for
from ipv6 import needs_ipv6

from torchbeast.sources.servers.waiting_clients import WaitingClients


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as sockets:
        yield sockets


@pytest.mark.parametrize("home", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_clients_wait_until_they_are_accepted_also_if_they_have_gone(
    opened: ExitStack, home: str
) -> None:
    family = socket.AF_INET6 if ":" in home else socket.AF_INET
    server, another = (
        opened.enter_context(socket.create_server((home, 0), family=family)) for _ in range(2)
    )
    waiting = WaitingClients(server.getsockname()[1])
    assert waiting.count() == 0
    for count in (1, 2, 3):
        client = socket.create_connection(server.getsockname()[:2])
        opened.enter_context(client)
        opened.enter_context(socket.create_connection(another.getsockname()[:2]))
        wait_for(lambda count=count: waiting.count() == count)  # type: ignore[misc]
    client.close()
    assert waiting.count() == 3
    opened.enter_context(server.accept()[0])
    assert waiting.count() == 2


def test_a_connection_of_the_port_is_nobody_who_waits(opened: ExitStack) -> None:
    server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = opened.enter_context(socket.create_connection(server.getsockname()))
    opened.enter_context(server.accept()[0])
    client.sendall(b"1")
    assert WaitingClients(server.getsockname()[1]).count() == 0


class Port:
    """A server that accepts whom the test says, and clients that come and stay."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.clients = WaitingClients(self._server.getsockname()[1])

    def come(self, count: int) -> None:
        there = self.clients.count()
        for _ in range(count):
            self._opened.enter_context(socket.create_connection(self._server.getsockname()))
        wait_for(lambda: self.clients.count() == there + count)

    def accept(self) -> socket.socket:
        return self._opened.enter_context(self._server.accept()[0])


@pytest.fixture
def port(opened: ExitStack) -> Port:
    return Port(opened)


def test_clients_wait_in_vain_while_nobody_is_accepted(port: Port) -> None:
    port.come(1)
    port.accept()
    port.come(2)
    assert not port.clients.wait_in_vain(), "one was accepted before the first look"
    assert port.clients.wait_in_vain()
    port.come(3)
    assert port.clients.wait_in_vain(), "others that come change nothing"


def test_a_flood_that_is_accepted_is_not_in_vain(port: Port) -> None:
    """As many come as are accepted, and those that were leave at once."""
    port.come(5)
    port.clients.wait_in_vain()
    before = None
    for _ in range(4):
        accepted = port.accept()
        if before is not None:
            before.close()
        before = accepted
        port.come(1)
        assert port.clients.count() == 5
        assert not port.clients.wait_in_vain()


def test_nobody_waits_in_vain_where_nobody_waits(port: Port) -> None:
    assert not port.clients.wait_in_vain()
    port.come(1)
    port.accept()
    assert not port.clients.wait_in_vain()
