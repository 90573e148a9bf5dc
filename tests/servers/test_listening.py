# SPDX-License-Identifier: Apache-2.0
"""An address to listen at stands for all addresses that it names, and is refused by its reason."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import ipv6
import pytest
from background import wait_for
from ipv6 import needs_ipv6
from keys_of_tests import TOKEN, Keys
from ports import free_port
from serving import serving

from libtorchbeast import Credentials
from torchbeast.errors import RunError, UsageError
from torchbeast.servers import addresses
from torchbeast.servers.addresses import answers, check_free, is_flooded
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials as credentials_of

HOME = ("127.0.0.1", ipv6.HOME)


@needs_ipv6
@pytest.mark.parametrize("taken_at", HOME)
def test_all_addresses_are_refused_if_another_program_has_the_port_at_one(taken_at: str) -> None:
    family = socket.AF_INET6 if ":" in taken_at else socket.AF_INET
    with socket.create_server((taken_at, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=r"\(Address already in use\): stop the program that uses the port"
        ):
            check_free(f"0.0.0.0:{port}")
    check_free(f"0.0.0.0:{port}")


def test_an_address_that_cannot_be_listened_at_is_refused_by_its_reason() -> None:
    with socket.create_server((HOME[0], 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=r"\(Address already in use\): stop the program that uses the port"
        ):
            check_free(f"127.0.0.1:{port}")
    check_free(f"127.0.0.1:{port}")
    with pytest.raises(UsageError, match="Cannot assign requested address"):
        check_free("192.0.2.1:50051")
    with pytest.raises(RunError, match="unknown on this machine"):
        check_free("no-such-host.invalid:50051")


@pytest.mark.parametrize("files", ["none", "certificate", "certificates of both"])
def test_a_server_that_serves_answers(tmp_path: Path, files: str) -> None:
    keys, port = Keys(tmp_path), free_port()
    credentials = Credentials(token=TOKEN)
    if files != "none":
        ca = keys.ca if files == "certificates of both" else None
        credentials = credentials_of(
            SecurityConfig(
                tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=ca, token_file=keys.token
            )
        )
    with serving(object, f"127.0.0.1:{port}", credentials=credentials):
        assert answers(f"127.0.0.1:{port}", 5.0)


def test_a_server_that_accepts_nobody_does_not_answer() -> None:
    with socket.create_server((HOME[0], 0)) as deaf:
        address = f"0.0.0.0:{deaf.getsockname()[1]}"
        assert not answers(address, 0.01)
    assert answers(address, 0.01), "nobody listens, so nobody is deaf"


def test_a_port_is_deaf_after_two_checks_in_a_row_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "PROBE_EVERY_S", 0.0)
    came = iter([False, True, False, False, True])
    monkeypatch.setattr(addresses, "answers", lambda *_: next(came))
    port = addresses.PortCheck("127.0.0.1:1")
    assert [port.is_deaf() for _ in range(5)] == [False, False, False, True, True]
    assert next(came), "it does not ask again"


def test_a_server_is_flooded_while_a_client_sends_more_than_it_reads() -> None:
    with socket.create_server((HOME[0], 0)) as server:
        address = f"0.0.0.0:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()) as client:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    client.send(bytes(1 << 16))
            assert not is_flooded(address), "nobody has accepted it"
            with server.accept()[0] as connection:
                wait_for(lambda: is_flooded(address))
                while is_flooded(address):
                    connection.recv(1 << 16)


def test_a_process_that_can_open_no_connection_does_not_answer() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server((HOME[0], 0)) as own:
        resource.setrlimit(resource.RLIMIT_NOFILE, (own.fileno() + 1, hard))
        try:
            assert not answers(f"127.0.0.1:{own.getsockname()[1]}", 0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
