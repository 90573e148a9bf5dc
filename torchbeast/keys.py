# SPDX-License-Identifier: Apache-2.0
"""Makes the files that protect PolyBeast across machines: an authority, certificates, a token.

python -m torchbeast.keys --hosts actors1.lab,actors2.lab,10.0.0.7     the learner connects to hosts
python -m torchbeast.keys --hosts learner.lab                           hosts dial in to the learner

Certificates are X.509, as PEM, with keys on the curve P-256. Needs the package cryptography:
pip install 'torchbeast[tls]'.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchbeast.cli.command_line import parse
from torchbeast.core.base.checks import Settings, between, setting
from torchbeast.errors import EXIT_DONE, UsageError, exit_code_of, expanded, refusing_paths
from torchbeast.reporting.run_folder import write_atomically

with suppress(ModuleNotFoundError):  # `run` reports its absence
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PROGRAM = "keys"
DAYS_OF_AUTHORITY = 3650
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9])?", re.ASCII | re.IGNORECASE)
_KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
_EARLIER = datetime.timedelta(hours=1)  # other machines' clocks may be slow


@dataclass(frozen=True, kw_only=True)
class KeysFlags(Settings):
    """Creates a certificate authority, certificates and a token for training on several
    machines."""

    hosts: str = ""
    """Names or addresses of the machines that listen, without ports, separated by commas: the
    environment servers, spelt as in the learner's --env_servers; or the learner, spelt as in
    --learner of the hosts that dial in."""
    folder: str = "torchbeast-keys"
    """Folder for the files. An authority and a token in it are reused; certificates are
    replaced."""
    days: int = setting(365, bounds=(between, 1, DAYS_OF_AUTHORITY))
    """Validity of the certificates in days."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if the files were written, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(KeysFlags, PROGRAM, argv)))


def run(flags: KeysFlags) -> int:
    """Writes the files, and prints where to copy them."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(
            "certificates are made with the package cryptography, which is not installed: "
            "pip install 'torchbeast[tls]'"
        )
    hosts = [host.strip() for host in flags.hosts.split(",") if host.strip()]
    if not hosts:
        raise UsageError(
            "--hosts is required: the names of the machines that listen, such as actors1.lab"
        )
    names = [_name_of(host) for host in hosts]
    with refusing_paths("use another --folder"):
        folder = expanded(flags.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(folder)
        _write_pair(folder, "server", new_server(authority, names, flags.days))
        _write_pair(folder, "client", new_client(authority, flags.days))
        if not (folder / "token").exists():
            _write(folder / "token", f"{secrets.token_urlsafe(32)}\n".encode())
    print(_what_goes_where(folder, flags.days))
    return EXIT_DONE


def _authority(folder: Path) -> Pair:
    """Returns the authority in the folder; makes one if there is none."""
    paths = folder / "ca.pem", folder / "ca-key.pem"
    if not any(path.exists() for path in paths):
        authority = new_authority()
        _write_pair(folder, "ca", authority)
        return authority
    try:
        certificate, key = (path.read_bytes() for path in paths)
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("expected a key on an elliptic curve")
        authority = Pair(x509.load_pem_x509_certificate(certificate), private)
    except (OSError, TypeError, ValueError) as error:  # TypeError: the key has a password
        raise UsageError(
            f"{paths[0]} and {paths[1]} cannot be reused as an authority ({error}): use another "
            "--folder"
        ) from None
    if authority.certificate.not_valid_after_utc <= _now():
        raise UsageError(
            f"the authority {paths[0]} has expired, and so have all certificates that it signed: "
            "use another --folder, and copy the new ca.pem to every machine"
        )
    return authority


def _write_pair(folder: Path, name: str, pair: Pair) -> None:
    _write(folder / f"{name}.pem", pair.certificate_pem())
    _write(folder / f"{name}-key.pem", pair.key_pem())


def _write(path: Path, content: bytes) -> None:
    """Replaces a file by a file that only this user can read."""
    write_atomically(path, content, mode=0o600)


def _what_goes_where(folder: Path, days: int) -> str:
    return f"""\
Saved to {folder}, readable only by its owner. Copy these files securely, for example by scp:
  to machines that listen     server.pem server-key.pem ca.pem token
  to machines that connect    client.pem client-key.pem ca.pem token
Keep ca-key.pem private: anyone who has it can issue certificates.
Start the listening program (polybeast_learner or polybeast_env) with these flags. It then
prints the command to run on the other machine.
  --listen 0.0.0.0:50051 --tls_cert server.pem --tls_key server-key.pem --tls_client_ca ca.pem \\
    --token_file token
The certificates are valid for {days} days. Run this command again to renew them."""


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


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _NAME.fullmatch(host):
            raise UsageError(
                f"--hosts has {host!r}, which is not the name or address of a machine: use names "
                "such as actors1.lab or 10.0.0.7, without ports"
            ) from None
        return x509.DNSName(host)


def new_authority() -> Pair:
    """Returns a new authority, which may sign certificates of machines, not of authorities."""
    use = dict.fromkeys(_KEY_USES, False) | {"key_cert_sign": True, "crl_sign": True}
    return _new("TorchBeast authority", DAYS_OF_AUTHORITY, None, x509.KeyUsage(**use))


def new_server(authority: Pair, hosts: Sequence[x509.GeneralName], days: int) -> Pair:
    """Returns the certificate and key for servers on these hosts."""
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName(hosts)
    return _new("environment servers", days, authority, use, names)


def new_client(authority: Pair, days: int) -> Pair:
    """Returns the certificate and key for a client, which cannot be used as a server."""
    use = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    return _new("learner", days, authority, use)


def _new(name: str, days: int, authority: Pair | None, *uses: x509.ExtensionType) -> Pair:
    """Returns a new key with its certificate. authority: signs it; None: it is an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.key if authority else key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = _now() - _EARLIER
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.issuer_name(authority.certificate.subject if authority else subject)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start)
    builder = builder.not_valid_after(start + datetime.timedelta(days=days) + _EARLIER)
    kind = x509.BasicConstraints(ca=authority is None, path_length=None if authority else 0)
    of_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    for extension in (kind, of_key, of_signer, *uses):
        builder = builder.add_extension(extension, critical=extension is kind)
    return Pair(builder.sign(signer, hashes.SHA256()), key)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


if __name__ == "__main__":
    sys.exit(main())
