# SPDX-License-Identifier: Apache-2.0
"""--env_servers names hosts by their first ports."""

from __future__ import annotations

import pytest

from torchbeast.errors import UsageError
from torchbeast.servers.addresses import host_and_port, hosts, server_addresses


def test_the_servers_of_a_host_are_at_consecutive_ports() -> None:
    assert server_addresses("a.lab:50051", 3) == ["a.lab:50051", "a.lab:50052", "a.lab:50053"]
    assert server_addresses("[::1]:65534", 2) == ["[::1]:65534", "[::1]:65535"]


def test_ports_above_the_last_are_refused() -> None:
    with pytest.raises(UsageError, match="3 servers need the ports 65534 to 65536, but 65535 is"):
        server_addresses("a:65534", 3)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a",
        "a:",
        "a:0",
        "a:-1",
        "a:65536",
        "a:http",
        ":1",
        "::1:80",
        "a b:1",
        "[::1]",
        "a:\u0661",
    ],
)
def test_anything_but_a_host_and_a_port_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT with a port of 1 to 65535"):
        host_and_port(address)


def test_hosts_are_listed_with_commas() -> None:
    assert hosts("a:1, b.lab:2,[::1]:3") == ["a:1", "b.lab:2", "[::1]:3"]


def test_a_host_that_a_command_names_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="^a:1,b:1,a:1 names a:1 twice: list each host once"):
        hosts("a:1,b:1,a:1")
