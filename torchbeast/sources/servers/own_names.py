# SPDX-License-Identifier: Apache-2.0
"""The name by which other machines reach what listens here, one that its certificate is for."""

from __future__ import annotations

import ipaddress
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from torchbeast.core.wording import typed
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.config import SecurityConfig
from torchbeast.sources.servers.own_certificate import own_certificate

_EVERY_NETWORK = ("0.0.0.0", "[::]")
_OF_MACHINES = ("DNS", "IP Address")  # kinds of names; others are of people and services


def shown_to_others(listen: str, names: Sequence[str] = ()) -> str:
    """Returns HOST:PORT for a shell elsewhere. names: in the certificate; (): there is none.

    Where this machine's own name is not among them, HOST is the first of them that is.
    """
    host, port = host_and_port(listen)
    own = _own_name(host)
    typed = [name for name in names if not set(name) & set("*:")]
    return shlex.quote(f"{own if _is_named(own, names) or not typed else typed[0]}:{port}")


def warning_of_names(listen: str, names: Sequence[str]) -> str:
    """Says by which names to reach this machine; "" where its own name is among them."""
    own = _own_name(host_and_port(listen)[0])
    if _is_named(own, names):
        return ""
    return f"The certificate does not name {own}: reach this machine as {' or '.join(names)}."


def flags_of_others(own: SecurityConfig) -> str:
    """Returns the flags with which the side that connects is let in.

    own: those of this side, which listens. Beside a server.pem are the other files that
    torchbeast.keys makes; else words in capitals stand for files of the other side.
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


def names_in(files: SecurityConfig) -> list[str]:
    """Returns the names and addresses that the certificate of the side that listens is for; []
    without one, or if the files cannot be used.
    """
    if files.tls_cert is None or files.tls_key is None:
        return []
    found = own_certificate(files.tls_cert, files.tls_key, connects=False)
    names = found.get("subjectAltName", ())
    return [_as_typed(name) for kind, name in names if kind in _OF_MACHINES]


def _as_typed(name: str) -> str:
    """Returns a name as flags have it: Python writes out all eight groups of IPv6, unbracketed."""
    return f"[{_in_one_form(name)}]" if ":" in name else name


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
