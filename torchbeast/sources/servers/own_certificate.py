# SPDX-License-Identifier: Apache-2.0
"""Reads this side's own certificate: when it is valid, and which machines it names.

A program checks the times when it starts, because the other side of a connection only closes it
when a certificate has expired. A program that listens prints a name from its certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchbeast.core.wording import typed
from torchbeast.errors import UsageError, expanded
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.config import LearnerSecurityConfig, SecurityConfig

_EVERY_NETWORK = ("0.0.0.0", "[::]")
_OTHER_CLOCK = datetime.timedelta(minutes=5)  # by which the clock of its maker may be ahead
_AGAIN = "make new ones with python -m torchbeast.keys"


def check_times(files: SecurityConfig) -> None:
    """Raises UsageError if this side's certificate or authority is not valid at present.

    Programs call this when they start. A program that already runs keeps its connections. Files
    that cannot be used pass; `credentials` says what is wrong with them.
    """
    connects = isinstance(files, LearnerSecurityConfig)
    if files.tls_cert is not None:
        _check(_certificates(files.tls_cert)[:1], "tls_cert", files.tls_cert, _AGAIN)
    flag, path = ("tls_ca", files.tls_ca) if connects else ("tls_client_ca", files.tls_client_ca)
    if path is not None:
        _check(_certificates(path), flag, path, f"{_AGAIN}, in another --folder")


def names_in(files: SecurityConfig) -> list[str]:
    """Returns the names and addresses in the certificate of the side that listens, as flags have
    them; [] without a certificate, or if its file cannot be used.
    """
    found = [] if files.tls_cert is None else _certificates(files.tls_cert)[:1]
    return [name for certificate in found for name in _machines(certificate)]


def shown_to_others(listen: str, names: Sequence[str] = ()) -> str:
    """Returns HOST:PORT for a shell elsewhere. names: in the certificate; (): there is none.

    HOST is this machine's own name if the certificate has it, else the first name that it has.
    """
    host, port = host_and_port(listen)
    own = _own_name(host)
    typed = [name for name in names if not set(name) & set("*:")]
    return shlex.quote(f"{own if _is_named(own, names) or not typed else typed[0]}:{port}")


def warning_of_names(listen: str, names: Sequence[str]) -> str:
    """Says by which names to reach this machine; "" if its own name is among them."""
    own = _own_name(host_and_port(listen)[0])
    if _is_named(own, names):
        return ""
    return f"The certificate does not name {own}: reach this machine as {' or '.join(names)}."


def flags_of_others(own: SecurityConfig) -> str:
    """Returns the flags with which the side that connects is let in.

    own: the files of this side, which listens. If it has the server.pem of torchbeast.keys, the
    other files are named as that program names them, else by words in capitals.
    """
    files = ["CA", "CERTIFICATE", "KEY"]
    if own.tls_cert is not None and (server := Path(own.tls_cert)).name == "server.pem":
        made = "ca.pem", "client.pem", "client-key.pem"
        files = [str(server.with_name(name)) for name in made]
    ca, cert, key = files
    words = typed("--tls_ca", ca) if own.tls_cert else ["--insecure"]
    words += [*typed("--tls_cert", cert), *typed("--tls_key", key)] if own.tls_client_ca else []
    words += typed("--token_file", own.token_file) if own.token_file else []
    return shlex.join(words)


def _certificates(path: str) -> list[Any]:
    """Returns the x509.Certificates in a file; [] if it cannot be used."""
    try:
        from cryptography import x509
    except ImportError:
        raise UsageError(
            "certificates are read with the package cryptography, which is not installed: "
            "pip install 'torchbeast[tls]'"
        ) from None
    try:
        return x509.load_pem_x509_certificates(expanded(path).read_bytes())
    except (OSError, ValueError):
        return []


def _check(found: Sequence[Any], flag: str, path: str, again: str) -> None:
    """Raises UsageError if none of the certificates is valid at present. A file of authorities may
    hold an old one next to the one that replaces it.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    times = [(one.not_valid_before_utc, one.not_valid_after_utc) for one in found]
    if not times or any(since - _OTHER_CLOCK <= now < until for since, until in times):
        return
    since, until = times[-1]
    what, first = ("is not valid yet", "set the clock, or ") if now < since else ("has expired", "")
    raise UsageError(
        f"--{flag} {path} {what}: it is valid from {_said(since)} to {_said(until)}, and the clock "
        f"of this machine says {_said(now)}: {first}{again}"
    )


def _said(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M UTC}"


def _machines(certificate: Any) -> list[str]:
    """Returns the names and addresses of machines, and none of people and services."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    machines = [n.value for n in names if isinstance(n, (x509.DNSName, x509.IPAddress))]
    return [f"[{name}]" if ":" in str(name) else str(name) for name in machines]


def _own_name(host: str) -> str:
    return socket.gethostname() if host in _EVERY_NETWORK else host


def _is_named(host: str, names: Sequence[str]) -> bool:
    """Returns whether a certificate with these names is for the host; any is if it has none."""
    own, known = _in_one_form(host), [_in_one_form(name) for name in names]
    return not known or own in known or f"*.{own.partition('.')[2]}" in known


def _in_one_form(name: str) -> str:
    """Returns a name, or an address of a machine, as every other spelling of it."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()
