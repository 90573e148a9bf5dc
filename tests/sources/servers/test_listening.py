# SPDX-License-Identifier: Apache-2.0
"""An address to listen at stands for all addresses that it names, and is refused by its reason."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import ipv6
import pytest
from ipv6 import needs_ipv6
from keys_of_tests import TOKEN, Keys
from serving import serving

from libtorchbeast import Credentials
from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers import listening
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.credentials import server_credentials
from torchbeast.sources.servers.listening import answers, check_free, listeners

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
            check_free(f"0.0.0.0:{port}")
    check_free(f"0.0.0.0:{port}")


def test_an_address_that_cannot_be_listened_at_is_refused_by_its_reason() -> None:
    with socket.create_server((HOME[0], 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"another program uses port {port}: end it, or"):
            check_free(f"127.0.0.1:{port}")
    check_free(f"127.0.0.1:{port}")
    with pytest.raises(UsageError, match="no address of this machine"):
        check_free("192.0.2.1:50051")
    with pytest.raises(RunError, match="unknown on this machine"):
        check_free("no-such-host.invalid:50051")


@pytest.mark.parametrize("files", ["none", "certificate", "certificates of both"])
def test_a_server_that_serves_answers(tmp_path: Path, files: str) -> None:
    keys, port = Keys(tmp_path), free_port()
    credentials = Credentials(token=TOKEN)
    if files != "none":
        ca = keys.ca if files == "certificates of both" else None
        credentials = server_credentials(
            ServerSecurityConfig(
                tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=ca, token_file=keys.token
            )
        )
    with serving(object, f"127.0.0.1:{port}", credentials=credentials):
        assert answers(f"127.0.0.1:{port}", 5.0)


@needs_ipv6
@pytest.mark.parametrize("deaf_at", [0, 1])
def test_a_server_that_accepts_nobody_at_one_of_its_addresses_does_not_answer(deaf_at: int) -> None:
    port = free_port()
    with ExitStack() as opened:
        both = [opened.enter_context(found) for found in listeners(f"0.0.0.0:{port}")]
        both[1 - deaf_at].close()
        assert not answers(f"[::]:{port}", 0.01)
    assert answers(f"[::]:{port}", 0.01), "nobody listens, so nobody is deaf"


def test_a_process_that_can_open_no_connection_does_not_answer() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server((HOME[0], 0)) as own:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own.fileno() + 1, hard))
        try:
            assert not answers(f"127.0.0.1:{own.getsockname()[1]}", 0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_machines_of_a_name_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 1))]
    monkeypatch.setattr(listening, "resolved", lambda host, port: known)
    assert answers("a.lab:1", 0.0001)
