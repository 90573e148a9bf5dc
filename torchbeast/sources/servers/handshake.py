# SPDX-License-Identifier: Apache-2.0
"""Finds out why the other side does not answer over TCP, where gRPC only says that it does not.

A connection is tried with Python's own TLS. It explains only what waiting cannot mend: a host
without an address, an end that uses TLS while the other does not, and a refused certificate. An end
that closes the connection before the handshake is over says nothing of that: so does a tunnel or a
load balancer behind which nobody listens yet.
"""

from __future__ import annotations

import os
import socket
import ssl

from torchbeast.errors import RunError, expanded
from torchbeast.sources.servers.addresses import host_and_port
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.hosts import resolved

_TIMEOUT_S = 3.0
_GRPC = "h2"  # the name of its protocol in a handshake
_PORT_OF_TLS = (
    "that port uses TLS: give --tls_ca, the authority of its certificate, in place of --insecure"
)
_NO_TLS = (
    "that port does not use TLS: start what listens there with --tls_cert and --tls_key, or give "
    "its own port"
)
_OTHER_PROGRAM = (
    "another program listens there, which does not speak gRPC: give the port of environment "
    "servers, or of a learner that hosts dial in to"
)
_CERTIFICATE_WANTED = (
    "it refused this side's certificate, or wants one: give --tls_cert and --tls_key, signed by "
    "its --tls_client_ca and not expired"
)
_CLOSED = f"it closed the connection without a reason: if this stays so, {_CERTIFICATE_WANTED}"
# Verification errors of OpenSSL, from <openssl/x509_vfy.h>.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64


class ClosedError(RunError):
    """The other side ended the connection after the handshake and did not say why.

    It refused this side's certificate, unless it ended at this moment.
    """


def silence_grpc() -> None:
    """Keeps gRPC from printing lines of its own about what is explained here, unless the user has
    set GRPC_VERBOSITY. A no-op once gRPC is in use.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def client_tls(files: LearnerSecurityConfig) -> ssl.SSLContext:
    """Returns the TLS of the side that connects; without --tls_ca it accepts every certificate, and
    only serves to see whether the other side uses TLS. Raises OSError for unusable files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([_GRPC])  # other programs choose none, servers of gRPC do
    if files.tls_ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(expanded(files.tls_ca))
    if files.tls_cert is not None and files.tls_key is not None:
        context.load_cert_chain(expanded(files.tls_cert), expanded(files.tls_key))
    return context


def explain(address: str, files: LearnerSecurityConfig, tls: ssl.SSLContext) -> None:
    """Raises RunError if the server cannot be reached for a reason that waiting does not mend.

    tls: what `client_tls` returned for these files, and connections to the server use.

    Raises ClosedError, which is a RunError too, if that is likely and not certain.
    Raises NoAddressError, likewise, for a name without an address. Returns if the server may still
    come, or nobody can say at this moment what address it has.
    """
    where, port = host_and_port(address)
    name, _, host = where.rpartition("@")
    try:
        with socket.create_connection((host.strip("[]"), port), _TIMEOUT_S) as connection:
            why = _fault(connection, (name or host).strip("[]"), files, tls)
    except (socket.gaierror, UnicodeError) as error:
        if not isinstance(error, OSError) or error.errno != socket.EAI_AGAIN:
            resolved(host, port)  # says what is wrong with the name
        return
    except OSError:  # nobody listens yet, or whoever does says nothing
        return
    if why:
        kind = ClosedError if why == _CLOSED else RunError
        raise kind(f"{address}: {why}")


def _fault(
    connection: socket.socket,
    name: str,
    files: LearnerSecurityConfig,
    tls: ssl.SSLContext,
) -> str:
    """Describes the fault that a handshake with the host `name` shows; "" if it shows none."""
    try:
        with tls.wrap_socket(connection, server_hostname=name) as encrypted:
            if not files.has_tls:
                return _PORT_OF_TLS
            speaks_grpc = encrypted.selected_alpn_protocol() == _GRPC
            return _fault_after_handshake(encrypted) if speaks_grpc else _OTHER_PROGRAM
    except ssl.SSLCertVerificationError as error:
        return _refusal(error, name, str(files.tls_ca))
    except ssl.SSLEOFError:  # whoever listens there closes connections for now
        return ""
    except ssl.SSLError as error:
        is_alert = "ALERT" in (error.reason or "")
        if not files.has_tls:
            return _PORT_OF_TLS if is_alert else ""
        return _CERTIFICATE_WANTED if is_alert else _NO_TLS


def _fault_after_handshake(tls: ssl.SSLSocket) -> str:
    """A server that refuses this side's certificate, or misses it, ends the connection only now,
    and not always with an alert; one that accepts it begins to speak.
    """
    try:
        return "" if tls.recv(1) else _CLOSED
    except (ssl.SSLEOFError, ConnectionError):
        return _CLOSED


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
