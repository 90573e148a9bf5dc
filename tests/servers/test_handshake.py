# SPDX-License-Identifier: Apache-2.0
"""A learner that cannot connect over TLS is told at once why, and what to do."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from keys_of_tests import Keys
from ports import free_port
from serving import serving

from libtorchbeast import Credentials
from torchbeast import envs
from torchbeast.errors import RunError
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.discovery import Asking, find_servers
from torchbeast.servers.security import silence_grpc

FOREVER = 100.0  # s, for which no test waits
DAYS = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture
def tcp() -> str:
    """Returns an address on the loopback without a server."""
    return f"127.0.0.1:{free_port()}"


@contextmanager
def served(address: str, **files: str) -> Iterator[None]:
    """Serves Catch over TLS, or without it if there are no files."""
    texts = {name: Path(path).read_text() for name, path in files.items()}
    credentials = Credentials(
        certificate=texts.get("tls_cert", ""),
        key=texts.get("tls_key", ""),
        ca=texts.get("tls_client_ca", ""),
        token=texts.get("token_file", ""),
    )
    with serving(lambda: envs.make("Catch", 1), address, credentials=credentials):
        yield


def found(address: str, timeout: float = FOREVER, **files: str) -> int:
    """Returns how many environments a learner with these files finds."""
    insecure = {} if files else {"insecure": True}
    security = SecurityConfig(**files, **insecure)
    return find_servers([address], None, Asking(timeout, security)).num_envs


def test_a_learner_finds_servers_over_tls_and_over_plain_tcp(keys: Keys, tcp: str) -> None:
    with served(tcp, tls_cert=keys.cert, tls_key=keys.key):
        assert found(tcp, tls_ca=keys.ca) == 1
    with served(tcp):
        assert found(tcp) == 1


@pytest.mark.parametrize("ca", [False, True], ids=["server", "mutual"])
def test_plain_text_to_a_port_of_tls_names_the_missing_flag(keys: Keys, tcp: str, ca: bool) -> None:
    client_ca = {"tls_client_ca": keys.ca} if ca else {}
    with served(tcp, tls_cert=keys.cert, tls_key=keys.key, **client_ca):
        with pytest.raises(RunError, match=f"^{tcp}: this port uses TLS: replace --insecure"):
            found(tcp)


def test_tls_to_a_port_of_plain_text_names_the_flags_of_the_servers(keys: Keys, tcp: str) -> None:
    with served(tcp):
        with pytest.raises(RunError, match=f"^{tcp}: this port does not use TLS: start .*tls_cert"):
            found(tcp, tls_ca=keys.ca)


@pytest.mark.parametrize(
    ("since", "text"),
    [(-3 * DAYS, "has expired"), (DAYS, "not yet valid")],
    ids=["expired", "early"],
)
def test_a_certificate_outside_of_its_time_is_refused(
    keys: Keys, tcp: str, since: datetime.timedelta, text: str
) -> None:
    cert, key = keys.server(since=since, name="late")
    with served(tcp, tls_cert=cert, tls_key=key):
        with pytest.raises(RunError, match=f"^{tcp}: its certificate .*{text}"):
            found(tcp, tls_ca=keys.ca)


def test_a_certificate_of_another_authority_is_refused(
    keys: Keys, tcp: str, tmp_path: Path
) -> None:
    foreign = Keys(tmp_path)
    with served(tcp, tls_cert=foreign.cert, tls_key=foreign.key):
        with pytest.raises(
            RunError, match="its certificate was rejected .*be signed by --tls_ca .*ca.pem; another"
        ):
            found(tcp, tls_ca=keys.ca)


@pytest.mark.parametrize(
    "name",
    [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("10.1.2.3"))],
    ids=["name", "address"],
)
def test_a_certificate_of_another_host_is_refused(
    keys: Keys, tcp: str, name: x509.GeneralName
) -> None:
    cert, key = keys.server([name], name="other")
    with served(tcp, tls_cert=cert, tls_key=key):
        with pytest.raises(
            RunError, match="its certificate was rejected .*: it must contain 127.0.0.1"
        ):
            found(tcp, tls_ca=keys.ca)


def test_a_learner_whose_certificate_is_missing_or_foreign_is_told_so(
    keys: Keys, tcp: str, tmp_path: Path
) -> None:
    foreign = Keys(tmp_path)
    pair = {"tls_cert": foreign.client_cert, "tls_key": foreign.client_key}
    with served(tcp, tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=keys.ca):
        for files in ({}, pair):
            with pytest.raises(RunError, match="use --tls_cert and --tls_key, signed by its"):
                found(tcp, tls_ca=keys.ca, **files)


def test_a_learner_without_the_token_is_told_so(keys: Keys, tcp: str) -> None:
    files = {"tls_cert": keys.cert, "tls_key": keys.key, "token_file": keys.token}
    with served(tcp, **files):
        with pytest.raises(RunError, match=f"{tcp}: token required: pass --token_file"):
            found(tcp, tls_ca=keys.ca)


@pytest.mark.parametrize(("asked", "then"), [(None, "NONE"), ("ERROR", "ERROR")])
def test_grpc_says_nothing_unless_the_user_has_asked_it_to(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, then: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if asked is None else {"GRPC_VERBOSITY": asked})
    silence_grpc()
    assert os.environ == {"GRPC_VERBOSITY": then}


def test_a_host_without_an_address_is_refused(keys: Keys) -> None:
    with pytest.raises(RunError, match=r"no-such-host\.invalid is unknown on this machine"):
        found("no-such-host.invalid:50051", tls_ca=keys.ca)


def test_a_host_that_does_not_listen_yet_is_awaited(keys: Keys, tcp: str) -> None:
    with pytest.raises(RunError, match=f"no environment server answers at {tcp} .waited 0.1 s"):
        found(tcp, timeout=0.1, tls_ca=keys.ca)


def test_a_host_that_accepts_connections_and_says_nothing_is_awaited(keys: Keys) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(RunError, match="waited 0.1 s"):
            found(address, timeout=0.1, tls_ca=keys.ca)
