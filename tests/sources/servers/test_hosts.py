# SPDX-License-Identifier: Apache-2.0
"""--env_servers names hosts directly, in a file, or by one name; --listen an address here."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.addresses import (
    NoAddressError,
    awaited_hosts,
    host_and_port,
    hosts,
    server_addresses,
)


def test_the_servers_of_a_host_are_at_consecutive_ports() -> None:
    assert server_addresses("a.lab:50051", 3) == ["a.lab:50051", "a.lab:50052", "a.lab:50053"]
    assert server_addresses("[::1]:65534", 2) == ["[::1]:65534", "[::1]:65535"]
    named = ["name@10.0.0.1:5", "name@10.0.0.1:6"]
    assert server_addresses("name@10.0.0.1:5", 2) == named


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


def test_hosts_are_listed_in_a_file(tmp_path: Path) -> None:
    listed = tmp_path / "hosts.txt"
    listed.write_text("# the actors\n\na:1\n  b:2   # in the corner\n")
    assert hosts(str(listed)) == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "names no host"),
        (b"# nobody\n", "names no host"),
        (b"a:1\n\n# b\nb\n", "expected HOST:PORT .* got 'b'"),
        (b"a:1\ndns:///no-such-host.invalid:1\n", "the host no-such-host"),
        (b"a:1\na:1\n", "hosts.txt names a:1 twice: name each host once"),
        (b"\xff\xfe", "cannot be read as a list of hosts"),
    ],
)
def test_a_file_without_a_list_of_hosts_is_refused(
    tmp_path: Path, content: bytes, text: str
) -> None:
    (tmp_path / "hosts.txt").write_bytes(content)
    with pytest.raises((UsageError, NoAddressError), match=text):
        hosts(str(tmp_path / "hosts.txt"))


def test_a_host_that_a_command_names_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="^a:1,b:1,a:1 names a:1 twice: name each host once"):
        hosts("a:1,b:1,a:1")


def test_a_missing_file_is_refused_with_both_ways_to_name_hosts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*HOST:PORT, or a file with one HOST:PORT"):
        hosts(str(tmp_path / "none.txt"))


def test_a_name_stands_for_a_host_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("actors.lab", 7)
        found = ["fd::1", "fd::2", "fd::1"]
        return [(socket.AF_INET6, 1, 6, "", (ip, port, 0, 0)) for ip in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert hosts("dns:///actors.lab:7") == ["actors.lab@[fd::1]:7", "actors.lab@[fd::2]:7"]


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(RunError, match=r"no-such-host\.invalid is unknown on this machine"):
        hosts("dns:///no-such-host.invalid:1")


def test_a_name_with_both_kinds_of_addresses_is_used_with_one_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that has one of each would be two hosts."""
    four = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{i}", 5)) for i in range(3)]
    six = [(socket.AF_INET6, 1, 6, "", (f"2001:db8::{i}", 5, 0, 0)) for i in range(3)]
    for found, wanted in (
        (six + four, ["[2001:db8::0]", "[2001:db8::1]", "[2001:db8::2]"]),
        (four + six, ["10.0.0.0", "10.0.0.1", "10.0.0.2"]),
    ):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert hosts("dns:///actors:5") == [f"actors@{host}:5" for host in wanted]


def test_a_name_is_awaited_until_it_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.1", 5))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("torchbeast.sources.servers.addresses._PAUSE_S", 0.0)
    assert awaited_hosts("dns:///actors:5", 60.0, lambda: None) == ["actors@10.0.0.1:5"]
    assert asked == ["actors"] * 3
    asked.clear()
    with pytest.raises(RunError, match="the host actors is unknown on this machine"):
        awaited_hosts("dns:///actors:5", 0.0, lambda: None)

    def ended() -> None:
        raise RunError("the run has ended")

    asked.clear()
    with pytest.raises(RunError, match="the run has ended"):
        awaited_hosts("dns:///actors:5", 1e6, ended)


def test_a_wrong_list_is_not_awaited() -> None:
    with pytest.raises(UsageError, match="cannot be read as a list of hosts"):
        awaited_hosts("/none", 1e6, lambda: None)
