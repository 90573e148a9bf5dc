# SPDX-License-Identifier: Apache-2.0
"""A door that cannot be reached, or is taken for servers, is explained in words."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from background import Background
from doors import opened
from keys_of_tests import Keys

from torchbeast.errors import RunError
from torchbeast.sources.servers.config import LearnerSecurityConfig, ServerSecurityConfig
from torchbeast.sources.servers.discovery import find_on
from torchbeast.sources.tunnel import tls
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.way import Way, reason

pytest.importorskip("libtorchbeast._C")


async def connect(*addresses: tuple[str, int]) -> None:
    """Connects to a name that has these addresses."""
    loop = asyncio.get_running_loop()

    async def known(*args: Any, **kwargs: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]

    loop.getaddrinfo = known  # type: ignore[method-assign]
    await loop.create_connection(asyncio.Protocol, "a.lab", addresses[0][1])


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
def test_a_name_where_nobody_listens_is_said_so_for_all_its_addresses(hosts: tuple[str]) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("0.0.0.0", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=r"Errno 111") as found:
            asyncio.run(connect(*((host, port) for host in hosts)))
    assert str(found.value).count("Errno 111") == len(hosts)
    assert reason(found.value, 1.0) == "nobody listens there now"


def test_a_door_is_reached_at_another_address_of_its_name_if_the_first_is_silent() -> None:
    """As where a firewall drops what is sent by IPv6."""

    async def greet(port: int) -> None:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def filtered(connecting: socket.socket, address: tuple[str, int]) -> None:
            if address[0] == "127.0.0.2":
                await loop.create_future()
            await connect(connecting, address)

        async def known(*args: Any, **kwargs: Any) -> list[Any]:
            addresses = [("127.0.0.2", port), ("127.0.0.1", port)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]

        loop.sock_connect, loop.getaddrinfo = filtered, known  # type: ignore[method-assign]
        way = Way(f"a.lab:{port}", LearnerSecurityConfig(insecure=True))
        await asyncio.wait_for(way.greet(Connection()), 5.0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeting = Background(asyncio.run, greet(listener.getsockname()[1]))
        listener.settimeout(5.0)
        with listener.accept()[0] as connected:
            connected.sendall(b"torchbeast door 3\n")
            assert connected.recv(100) == b"token \n"
        greeting.result()


def test_errors_are_named_and_one_without_a_number_speaks_for_itself() -> None:
    several = OSError("Multiple exceptions: [Errno 111] at ('::1', 1), [Errno 101] at ('a', 1)")
    unreachable = os.strerror(errno.ENETUNREACH)
    assert reason(several, 1.0) == f"{unreachable}, {os.strerror(errno.ECONNREFUSED)}"
    assert reason(OSError(errno.ENETUNREACH, "Connect call failed"), 1.0) == unreachable
    assert reason(ConnectionError("the other end left"), 1.0) == "the other end left"
    assert reason(asyncio.TimeoutError(), 2.5) == "no answer within 2.5 s"
    assert reason(ValueError(), 1.0) == "ValueError"


def test_the_port_of_a_learner_for_hosts_is_told_from_that_of_servers(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    files = ServerSecurityConfig(tls_cert=keys.cert, tls_key=keys.key)
    with opened(tmp_path, tls.of_door(files)) as door:
        address = f"127.0.0.1:{door.port}"
        with pytest.raises(RunError, match=f"^{address}: no environment servers listen there"):
            find_on([address], None, 60.0, LearnerSecurityConfig(tls_ca=keys.ca))
