# SPDX-License-Identifier: Apache-2.0
"""An address to listen at stands for all addresses that it names, and is refused by its reason."""

from __future__ import annotations

import resource
import socket

import ipv6
import pytest
from ipv6 import needs_ipv6

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers import listening
from torchbeast.sources.servers.listening import check_free, check_listens, listeners
from torchbeast.sources.servers.own_sockets import listened_at

HOME = ("127.0.0.1", ipv6.HOME)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def reached(address: str, home: str, port: int) -> bool:
    """Returns whether a connection from this machine arrives, from the address it really has."""
    found = listeners(address)
    try:
        with socket.create_connection((home, port), timeout=10) as calling:
            for listener in found:
                try:
                    connected, peer = listener.accept()
                except BlockingIOError:
                    continue
                connected.close()
                return bool(peer[0] == home and peer[1] == calling.getsockname()[1])
            return False
    except ConnectionRefusedError:
        return False
    finally:
        for listener in found:
            listener.close()


@needs_ipv6
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize("home", HOME)
def test_all_addresses_are_those_of_ipv4_and_of_ipv6(host: str, home: str) -> None:
    port = free_port()
    assert reached(f"{host}:{port}", home, port)


@needs_ipv6
@pytest.mark.parametrize(("host", "home"), [("127.0.0.1", HOME[0]), ("[::1]", HOME[1])])
def test_an_address_is_that_address_alone(host: str, home: str) -> None:
    port = free_port()
    assert reached(f"{host}:{port}", home, port)
    (other,) = set(HOME) - {home}
    assert not reached(f"{host}:{port}", other, port)


@needs_ipv6
def test_a_name_stands_for_its_addresses_and_those_that_are_not_here_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    elsewhere = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))
    here = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOME[0], port)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (HOME[1], port, 0, 0)),
    ]
    known = [elsewhere, *here, here[0]]
    monkeypatch.setattr(listening, "resolved", lambda host, port: known)
    assert all(reached(f"a.lab:{port}", home, port) for home in HOME)
    known[1:] = []
    with pytest.raises(UsageError, match="no address of this machine"):
        listeners(f"a.lab:{port}")


@needs_ipv6
@pytest.mark.parametrize("taken_at", HOME)
def test_all_addresses_are_refused_if_another_program_has_the_port_at_one(taken_at: str) -> None:
    family = socket.AF_INET6 if ":" in taken_at else socket.AF_INET
    with socket.create_server((taken_at, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"another program uses port {port}: end it, or"):
            check_free([f"0.0.0.0:{port}"])
    check_free([f"0.0.0.0:{port}"])


def test_an_address_that_cannot_be_listened_at_is_refused_by_its_reason() -> None:
    with socket.create_server((HOME[0], 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"another program uses port {port}: end it, or"):
            check_free([f"127.0.0.1:{port}"])
    check_free([f"127.0.0.1:{port}"])
    with pytest.raises(UsageError, match="no address of this machine"):
        check_free(["192.0.2.1:50051"])
    with pytest.raises(RunError, match="unknown on this machine"):
        check_free(["no-such-host.invalid:50051"])


@needs_ipv6
def test_who_listens_at_all_addresses_does_so_with_one_socket_or_two() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as one:
        assert listened_at(one.getsockname()[1]) == {"0.0.0.0", "::"}
    port = free_port()
    four, six = listeners(f"0.0.0.0:{port}")
    with four, six:
        assert listened_at(port) == {"0.0.0.0", "::"}
        four.close()
        assert listened_at(port) == {"::"}


@needs_ipv6
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize("taken_at", HOME)
def test_who_listens_at_some_addresses_is_refused_if_another_program_has_the_others(
    host: str, taken_at: str
) -> None:
    port = free_port()
    four, six = listeners(f"0.0.0.0:{port}")
    family = socket.AF_INET6 if ":" in taken_at else socket.AF_INET
    with four, six, socket.socket(family) as another:
        check_listens(f"{host}:{port}")
        (six if family == socket.AF_INET6 else four).close()
        check_listens(f"{host}:{port}")
        another.bind((taken_at, port))  # that it does not listen keeps it from being our own
        with pytest.raises(UsageError, match=f"another program uses port {port}: end it, or"):
            check_listens(f"{host}:{port}")


def test_sockets_are_not_known_while_all_descriptors_are_used() -> None:
    """A server must not take its own sockets for those of another program then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server((HOME[0], 0)) as own:
        port = own.getsockname()[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (own.fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                check_listens(f"127.0.0.1:{port}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        check_listens(f"127.0.0.1:{port}")


@needs_ipv6
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_who_listens_at_one_address_does_so_there_alone(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as own:
        if family == socket.AF_INET6:  # for the address that is IPv4 in the form of IPv6
            own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        own.bind((address, 0))
        own.listen()
        port = own.getsockname()[1]
        assert listened_at(port) == {"::1" if address == "::1" else "127.0.0.1"}


def test_nobody_needs_to_listen_at_an_address_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server((HOME[0], 0)) as own:
        port = own.getsockname()[1]
        places = [(host, port) for host in ("192.0.2.1", HOME[0])]
        known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
        monkeypatch.setattr(listening, "resolved", lambda host, port: known)
        check_listens(f"a.lab:{port}")
