# SPDX-License-Identifier: Apache-2.0
"""Certificates of a small authority (X.509, keys on the curve P-256), as PEM."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchbeast.errors import UsageError
from torchbeast.keys.config import DAYS_OF_AUTHORITY

_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9])?", re.ASCII | re.IGNORECASE)
_AUTHORITY = "TorchBeast authority"
_EARLIER = datetime.timedelta(hours=1)  # the clocks of other machines may be behind


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        """Returns the certificate as text."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """Returns the key as text, without a password."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def pair_from_pem(certificate: bytes, key: bytes) -> Pair:
    """Reads a pair; raises ValueError if it is none."""
    private = serialization.load_pem_private_key(key, password=None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("expected a key on an elliptic curve")
    return Pair(x509.load_pem_x509_certificate(certificate), private)


def is_over(pair: Pair) -> bool:
    """Returns whether the certificate has expired."""
    return pair.certificate.not_valid_after_utc <= _now()


def names_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Returns hosts as they stand in a certificate; raises UsageError for an invalid one."""
    return [_name_of(host) for host in hosts]


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"--hosts has {host!r}, which is no name or address of a machine: give names such "
                "as actors1.lab or 10.0.0.7, without ports"
            ) from None
        return x509.DNSName(host)


def new_authority(since: datetime.datetime | None = None) -> Pair:
    """Returns a new authority, which signs certificates of machines but of no other authority.

    since: when it becomes valid; None: now.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_AUTHORITY, key, since or _now() - _EARLIER, DAYS_OF_AUTHORITY)
    builder = builder.issuer_name(_called(_AUTHORITY))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def new_server(
    authority: Pair,
    hosts: Sequence[x509.GeneralName],
    days: int,
    since: datetime.datetime | None = None,
) -> Pair:
    """Returns the pair of servers on these hosts; since: when it becomes valid, None: now."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, "environment servers", key, days, since)
    builder = builder.add_extension(_use(ExtendedKeyUsageOID.SERVER_AUTH), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def new_client(authority: Pair, days: int, since: datetime.datetime | None = None) -> Pair:
    """Returns the pair of a learner, with which nobody can pretend to be a server.

    since: when it becomes valid; None: now.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, "learner", key, days, since)
    builder = builder.add_extension(_use(ExtendedKeyUsageOID.CLIENT_AUTH), critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _leaf(
    authority: Pair,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    since: datetime.datetime | None,
) -> x509.CertificateBuilder:
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = _builder(name, key, since or _now() - _EARLIER, days)
    builder = builder.issuer_name(authority.certificate.subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_key_usage(signs=False), critical=True)
    return builder.add_extension(signer, critical=False)


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, since: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    public = key.public_key()
    builder = x509.CertificateBuilder().subject_name(_called(name)).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(since)
    builder = builder.not_valid_after(since + datetime.timedelta(days=days) + _EARLIER)
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    return builder.add_extension(own, critical=False)


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _use(purpose: x509.ObjectIdentifier) -> x509.ExtendedKeyUsage:
    return x509.ExtendedKeyUsage([purpose])


def _key_usage(signs: bool) -> x509.KeyUsage:
    """Returns the use of an authority's key, which signs certificates, or of a machine's."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
