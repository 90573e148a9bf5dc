# SPDX-License-Identifier: Apache-2.0
"""Finds out why the other side does not answer over TCP, where gRPC only says that it does not.

A connection is tried with Python's own TLS. It explains only what waiting cannot mend: a host
without an address, an end that uses TLS while the other does not, and a refused certificate.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from torchbeast.errors import RunError
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.hosts import resolved

_TIMEOUT_S = 3.0
_PORT_OF_TLS = "that port uses TLS: give --tls_ca, the authority of its certificate, for --insecure"
_NO_TLS = (
    "that port does not use TLS: start what listens there with --tls_cert and --tls_key, or give "
    "its own port"
)
_CERTIFICATE_WANTED = (
    "it refused this side's certificate, or wants one: give --tls_cert and --tls_key, signed by "
    "its --tls_client_ca and not expired"
)
# Verification errors of OpenSSL, from <openssl/x509_vfy.h>.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64


def explain(address: str, files: LearnerSecurityConfig) -> None:
    """Raises RunError if the server cannot be reached for a reason that waiting does not mend.

    Raises UsageError for a name without an address. Returns if the server may still come.
    """
    where, port = host_and_port(address)
    name, _, host = where.rpartition("@")
    resolved(host, port)
    try:
        with socket.create_connection((host.strip("[]"), port), _TIMEOUT_S) as connection:
            why = _fault(connection, (name or host).strip("[]"), files)
    except OSError:  # nobody listens yet, or whoever does says nothing
        return
    if why:
        raise RunError(f"{address}: {why}")


def _fault(connection: socket.socket, name: str, files: LearnerSecurityConfig) -> str:
    """Describes the fault that a handshake with the host `name` shows; "" if it shows none."""
    try:
        _shake_hands(connection, name, files)
    except ssl.SSLCertVerificationError as error:
        return _refusal(error, name, str(files.tls_ca))
    except (ssl.SSLEOFError, ConnectionError):
        return _CERTIFICATE_WANTED if files.has_tls else ""
    except ssl.SSLError as error:
        is_alert = "ALERT" in (error.reason or "")
        if not files.has_tls:
            return _PORT_OF_TLS if is_alert else ""
        return _CERTIFICATE_WANTED if is_alert else _NO_TLS
    return "" if files.has_tls else _PORT_OF_TLS


def _shake_hands(connection: socket.socket, name: str, files: LearnerSecurityConfig) -> None:
    with _context(files).wrap_socket(connection, server_hostname=name) as tls:
        # A server that refuses this side's certificate, or misses it, ends the connection after the
        # handshake; one that accepts it begins to speak.
        if files.has_tls and not tls.recv(1):
            raise ssl.SSLEOFError


def _context(files: LearnerSecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if files.tls_ca is None:  # only to see whether the server uses TLS
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(Path(files.tls_ca).expanduser())
    if files.tls_cert is not None and files.tls_key is not None:
        context.load_cert_chain(Path(files.tls_cert).expanduser(), Path(files.tls_key).expanduser())
    return context


def _refusal(error: ssl.SSLCertVerificationError, name: str, ca: str) -> str:
    """Says why this side refused the server's certificate, and what to do."""
    if error.verify_code == _EXPIRED:
        return "its certificate has expired: make a new one and restart what listens there"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: set the clocks of both machines"
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return (
            f"its certificate does not name {name}: make one for this name, or reach the host by a "
            "name in it"
        )
    return (
        f"its certificate is not signed by --tls_ca {ca} ({error.verify_message}): give the "
        "authority that signed it; another machine may have answered"
    )
