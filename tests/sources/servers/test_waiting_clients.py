# SPDX-License-Identifier: Apache-2.0
"""Clients that wait are counted at one's own port, and a server that accepts nobody is told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from background import wait_for
from ipv6 import needs_ipv6

from torchbeast.sources.servers.waiting_clients import WaitingClients, nobody_is_accepted


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


@pytest.mark.parametrize(
    ("counts", "in_vain"),
    [
        ([1, 1, 1], True),
        ([1, 2, 9], True),
        ([0, 1, 1], False),
        ([3, 3, 2], False),
        ([3, 2, 3], False),
        ([0, 0, 0], False),
    ],
)
def test_clients_wait_in_vain_if_they_never_become_fewer(counts: list[int], in_vain: bool) -> None:
    assert nobody_is_accepted(counts) == in_vain
