# SPDX-License-Identifier: Apache-2.0
"""Whoever listens tells others a name that its certificate is for."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from keys_of_tests import Keys, write

from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.own_names import (
    flags_of_others,
    names_in,
    shown_to_others,
    warning_of_names,
)


@pytest.fixture(autouse=True)
def own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")


@pytest.mark.parametrize(
    ("listen", "names", "shown"),
    [
        ("0.0.0.0:1", [], "node7:1"),
        ("[::]:1", [], "node7:1"),
        ("[fd00::1]:1", [], "'[fd00::1]:1'"),  # brackets are a pattern for shells
        ("10.0.0.1:1", [], "10.0.0.1:1"),
        ("0.0.0.0:1", ["a.lab", "node7"], "node7:1"),
        ("0.0.0.0:1", ["*.lab", "fd00::1", "a.lab", "10.0.0.1"], "a.lab:1"),
        ("10.0.0.1:1", ["a.lab", "10.0.0.1"], "10.0.0.1:1"),
        ("10.0.0.1:1", ["a.lab"], "a.lab:1"),
        ("0.0.0.0:1", ["*.lab"], "node7:1"),
        ("b.lab:1", ["a.lab", "*.lab"], "b.lab:1"),
    ],
)
def test_others_are_told_a_name_of_the_certificate(
    listen: str, names: list[str], shown: str
) -> None:
    assert shown_to_others(listen, names) == shown


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"insecure": True}, "--insecure"),
        ({"insecure": True, "token_file": "a token"}, "--insecure --token_file 'a token'"),
        (
            {"tls_cert": "k/server.pem", "tls_key": "k/server-key.pem", "token_file": "k/token"},
            "--tls_ca k/ca.pem --token_file k/token",
        ),
        (
            {"tls_cert": "server.pem", "tls_key": "server-key.pem", "tls_client_ca": "ca.pem"},
            "--tls_ca ca.pem --tls_cert client.pem --tls_key client-key.pem",
        ),
        (
            {"tls_cert": "/tls/tls.crt", "tls_key": "/tls/tls.key", "tls_client_ca": "ca"},
            "--tls_ca CA --tls_cert CERTIFICATE --tls_key KEY",
        ),
    ],
)
def test_the_flags_of_the_other_side_fit_those_of_this_one(
    own: dict[str, Any], others: str
) -> None:
    assert flags_of_others(ServerSecurityConfig(**own)) == others


def test_a_certificate_that_lacks_the_own_name_is_warned_about() -> None:
    assert warning_of_names("0.0.0.0:1", ["a.lab", "10.0.0.1"]) == (
        "The certificate does not name node7: reach this machine as a.lab or 10.0.0.1."
    )
    for names in ([], ["node7"], ["NODE7"]):
        assert warning_of_names("0.0.0.0:1", names) == ""
    for address in ("[2001:db8::5]", "[2001:DB8:0::5]"):
        assert warning_of_names(f"{address}:1", ["2001:DB8:0:0:0:0:0:5"]) == ""
    assert warning_of_names("[2001:db8::6]:1", ["2001:DB8:0:0:0:0:0:5"])


def test_names_are_read_from_the_certificate_even_if_it_has_expired(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    addresses = [x509.IPAddress(ipaddress.ip_address(name)) for name in ("10.0.0.1", "fd00::1")]
    names = [x509.DNSName("a.lab"), *addresses, x509.RFC822Name("someone@a.lab")]
    for since in (0, -3):
        cert, key = keys.server(names, datetime.timedelta(days=since), "other")
        files = ServerSecurityConfig(tls_cert=cert, tls_key=key, token_file=keys.token)
        assert names_in(files) == ["a.lab", "10.0.0.1", "[fd00::1]"], "as flags have them"


def test_files_that_cannot_be_used_have_no_names(tmp_path: Path) -> None:
    """Others say what is wrong with them."""
    keys = Keys(tmp_path)
    odd = write(tmp_path / "odd", "odd")
    for cert, key in ((odd, keys.key), (keys.cert, "/none"), (keys.cert, keys.client_key)):
        assert names_in(ServerSecurityConfig(tls_cert=cert, tls_key=key)) == []
    assert names_in(ServerSecurityConfig(insecure=True)) == []
