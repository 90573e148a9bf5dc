# SPDX-License-Identifier: Apache-2.0
"""The files that protect connections between machines.

`credentials` reads and checks them, `explain` says why the other side refuses them, and
`flags_of_others` returns the flags for the other side. Other processes get only the names of the
files, and read them themselves.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import ssl
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchbeast.core.base.checks import command, typed
from torchbeast.errors import RunError, UsageError, expanded
from torchbeast.servers.addresses import EVERY_NETWORK, host_and_port, resolved
from torchbeast.servers.config import SecurityConfig

if TYPE_CHECKING:
    import libtorchbeast

_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 1000  # 22 characters of base64 are as strong as an AES key
_KEYS = f"{command('keys')} creates one"

_CONNECT_S = 3.0
_PORT_OF_TLS = (
    "this port uses TLS: replace --insecure with --tls_ca and the other side's CA certificate"
)
_NO_TLS = (
    "this port does not use TLS: start the listening side with --tls_cert and --tls_key, or use "
    "another port"
)
_CERTIFICATE_WANTED = (
    "certificate required, or this one was rejected: use --tls_cert and --tls_key, signed by its "
    "--tls_client_ca and not expired"
)


def credentials(files: SecurityConfig) -> libtorchbeast.Credentials:
    """Returns the contents of the files; raises UsageError for files that cannot be used."""
    from libtorchbeast import Credentials

    return Credentials(
        ca=_authorities(files),
        certificate="" if files.tls_cert is None else _text(files.tls_cert, "tls_cert"),
        key=_key(files),
        token=_token(files.token_file),
    )


def _authorities(files: SecurityConfig) -> str:
    """Returns the certificates of the authorities that may sign the other side's certificate."""
    flag, path = "tls_ca", files.tls_ca
    if path is None:
        flag, path = "tls_client_ca", files.tls_client_ca
    text = "" if path is None else _text(path, flag)
    try:
        if path is not None:
            ascii_text = text.encode("ascii", "replace").decode()  # comments may have other letters
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ascii_text)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"--{flag} {path} has no certificate in PEM: {_KEYS}") from None
    return text


def _key(files: SecurityConfig) -> str:
    """Returns the key of the certificate."""
    if files.tls_cert is None or files.tls_key is None:
        return ""
    text = _private_text(files.tls_key, "tls_key")
    try:
        _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files.tls_cert, files.tls_key)
    except ssl.SSLError:
        raise UsageError(
            f"tls_key {files.tls_key} is not the key of a certificate tls_cert "
            f"{files.tls_cert}: use a matching pair, in PEM and without a password, because "
            "replaced servers cannot prompt for it"
        ) from None
    return text


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    context.load_cert_chain(expanded(cert), expanded(key), password="")  # OpenSSL asks for none


def _token(path: str | None) -> str:
    if path is None:
        return ""
    token = _private_text(path, "token_file").strip()
    is_word = token.isascii() and token.isprintable() and " " not in token
    if not is_word or not _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN:
        raise UsageError(
            f"token_file {path} must contain one word of {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} "
            f"printable ASCII characters, but it contains something else: {_KEYS}"
        )
    return token


def _private_text(path: str, flag: str) -> str:
    text, status = _text(path, flag), expanded(path).stat()
    # As in PostgreSQL: a group may read a file of root, because Kubernetes mounts such files.
    for_others = 0o027 if status.st_uid == 0 and os.getuid() != 0 else 0o077
    if stat.S_IMODE(status.st_mode) & for_others:
        raise UsageError(
            f"--{flag} {path} can be read by other users (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): make it private, chmod 600 {shlex.quote(path)}"
        )
    return text


def _text(path: str, flag: str) -> str:
    try:
        return expanded(path).read_text()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"--{flag} {path} cannot be read ({reason}): use a readable file"
        ) from None


def flags_of_others(flag: str, listen: Sequence[str], own: SecurityConfig) -> str:
    """Returns the flags that others need to connect to this machine.

    flag: for the addresses. own: the files of this side. For the files of the other side it uses
    the names that torchbeast.keys gives them.
    """
    reached = ",".join(_reached_at(address) for address in listen)
    words = [flag, reached, *(typed("--tls_ca", "ca.pem") if own.tls_cert else ["--insecure"])]
    if own.tls_client_ca:
        words += ["--tls_cert", "client.pem", "--tls_key", "client-key.pem"]
    words += ["--token_file", "token"] if own.token_file else []
    return shlex.join(words)


def _reached_at(listen: str) -> str:
    """Returns HOST:PORT for others, with this machine's name in place of 0.0.0.0."""
    host, port = host_and_port(listen)
    return f"{socket.gethostname() if host.strip('[]') in EVERY_NETWORK else host}:{port}"


def silence_grpc() -> None:
    """Keeps gRPC from printing its own messages about errors that are explained here, unless the
    user has set GRPC_VERBOSITY. Has no effect if gRPC is already in use.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def explain(address: str, files: SecurityConfig) -> None:
    """Raises RunError if the other side cannot be reached for a reason that waiting cannot fix.

    Such reasons are an unknown host, TLS on one side only, and a refused certificate. gRPC itself
    only reports that the other side does not answer.

    Returns if the other side may still come. This includes a connection that is closed before the
    end of the handshake, because a tunnel or a load balancer without a listener does the same.
    """
    host, port = host_and_port(address)
    resolved(host, port)
    name = host.strip("[]")
    with contextlib.suppress(OSError):  # nobody listens yet, or does not answer
        with socket.create_connection((name, port), _CONNECT_S) as connection:
            if why := _fault(connection, name, files):
                raise RunError(f"{address}: {why}")


def _fault(connection: socket.socket, name: str, files: SecurityConfig) -> str:
    """Describes the error of a handshake with the host `name`; "" if there is none."""
    has_tls, closed = files.tls_ca is not None, ""
    try:
        with _client_tls(files).wrap_socket(connection, server_hostname=name) as encrypted:
            if not has_tls:
                return _PORT_OF_TLS
            # A server that refuses this side's certificate, or misses it, closes the connection
            # only now, and not always with an alert. A server that accepts it starts to speak.
            closed = _CERTIFICATE_WANTED
            return "" if encrypted.recv(1) else closed
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate was rejected ({error.verify_message}): it must contain {name}, be "
            f"valid now, and be signed by --tls_ca {files.tls_ca}; another machine may have "
            "answered"
        )
    except (ssl.SSLEOFError, ConnectionError):  # during the handshake: it closes all for now
        return closed
    except ssl.SSLError as error:
        is_alert = "ALERT" in (error.reason or "")
        if not has_tls:
            return _PORT_OF_TLS if is_alert else ""
        return _CERTIFICATE_WANTED if is_alert else _NO_TLS


def _client_tls(files: SecurityConfig) -> ssl.SSLContext:
    """Returns the TLS context of the side that connects. Without --tls_ca it accepts any
    certificate, and only serves to find out whether the other side uses TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])  # the name of gRPC's protocol in a handshake
    if files.tls_ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(expanded(files.tls_ca))
    if files.tls_cert is not None and files.tls_key is not None:
        _load_pair(context, files.tls_cert, files.tls_key)
    return context
