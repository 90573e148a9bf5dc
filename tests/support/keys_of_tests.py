# SPDX-License-Identifier: Apache-2.0
"""Authorities, certificates and a token for tests of connections between machines."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

from cryptography import x509

from torchbeast.keys import Pair, new_authority, new_client, new_server
from torchbeast.servers.config import SecurityConfig

LOCALHOST = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
TOKEN = "a-token-of-this-test"


def write(path: Path, content: bytes | str) -> str:
    """Writes a file that only this user can read; returns its name."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    return str(path)


@contextmanager
def valid_from(since: datetime.timedelta) -> Iterator[None]:
    """Lets certificates that are made meanwhile be valid from now + since."""
    now = datetime.datetime.now(datetime.timezone.utc) + since + datetime.timedelta(hours=1)
    with mock.patch("torchbeast.keys._now", lambda: now):
        yield


class Keys:
    """The files of one authority, in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.authority = new_authority()
        self.ca = write(folder / "ca.pem", self.authority.certificate_pem())
        self.token = write(folder / "token", TOKEN)
        self.cert, self.key = self.server()
        self.client_cert, self.client_key = self.save("client", new_client(self.authority, 1))

    def server(
        self,
        hosts: Sequence[x509.GeneralName] = LOCALHOST,
        since: datetime.timedelta = datetime.timedelta(hours=-1),
        name: str = "server",
    ) -> tuple[str, str]:
        """Writes a server's pair, valid for a day from now + since; returns the files' names."""
        with valid_from(since):
            return self.save(name, new_server(self.authority, hosts, 1))

    def client(self, since: datetime.timedelta, name: str) -> tuple[str, str]:
        """Writes a pair for the side that connects, as `server` does."""
        with valid_from(since):
            return self.save(name, new_client(self.authority, 1))

    def ends(self, protection: str) -> tuple[SecurityConfig, SecurityConfig]:
        """Returns the files of the end that listens and of the end that dials.

        protection: token (without TLS), TLS (and a token) or certificates (of both, and a token).
        """
        if protection == "token":
            token = SecurityConfig(insecure=True, token_file=self.token)
            return token, token
        listens = SecurityConfig(tls_cert=self.cert, tls_key=self.key, token_file=self.token)
        dials = SecurityConfig(tls_ca=self.ca, token_file=self.token)
        if protection == "TLS":
            return listens, dials
        return replace(listens, tls_client_ca=self.ca), replace(
            dials, tls_cert=self.client_cert, tls_key=self.client_key
        )

    def save(self, name: str, pair: Pair) -> tuple[str, str]:
        """Writes a pair; returns the names of its files."""
        certificate = write(self.folder / f"{name}.pem", pair.certificate_pem())
        return certificate, write(self.folder / f"{name}-key.pem", pair.key_pem())
