# SPDX-License-Identifier: Apache-2.0
"""What this side's own certificates say of themselves: names, and the times between which they are
valid.

Python reads the certificate of a peer only, so this side shakes hands with itself. Nobody else
would say in time that it has expired: the other side only closes the connection.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchbeast.errors import UsageError, expanded
from torchbeast.sources.servers.config import LearnerSecurityConfig, SecurityConfig

_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which ssl does not name
_FLIGHTS = 4  # of messages in a handshake, at most
_TIMES = ("notBefore", "notAfter")
_OTHER_CLOCK_S = 300.0  # by which the clock of the machine that made a certificate may be ahead
_AGAIN = "make new ones with python -m torchbeast.keys"


def own_certificate(cert: str, key: str, connects: bool) -> Mapping[str, Any]:
    """Returns what ssl.getpeercert() has of this side's certificate, valid at present or not; {} if
    the files cannot be used.

    connects: it is the certificate of a side that connects; else of one that listens.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    reader = server if connects else client
    reader.verify_mode = ssl.CERT_REQUIRED
    reader.verify_flags |= ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
    with contextlib.suppress(OSError):  # those of ssl are among them
        chain, private = expanded(cert), expanded(key)
        for side in (server, client):
            side.load_cert_chain(chain, private, password="")  # asks nobody for one
        reader.load_verify_locations(chain)
        return _handshake(server, client)[0 if connects else 1].getpeercert() or {}
    return {}


def check_times(files: SecurityConfig) -> None:
    """Raises UsageError if this side's certificate or authority is not valid at present.

    For the start of a program: one that runs keeps the connections that it has. Files that cannot
    be used pass; others say what is wrong with them.
    """
    connects = isinstance(files, LearnerSecurityConfig)
    if files.tls_cert is not None and files.tls_key is not None:
        own = own_certificate(files.tls_cert, files.tls_key, connects)
        _check([own] if own else [], "tls_cert", files.tls_cert, _AGAIN)
    flag, path = ("tls_ca", files.tls_ca) if connects else ("tls_client_ca", files.tls_client_ca)
    if path is not None:
        _check(_authorities(path), flag, path, f"{_AGAIN}, in another --folder")


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ...]:
    """Returns both ends after a handshake."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    ours = client.wrap_bio(to_client, to_server)
    for side in (ours, theirs) * _FLIGHTS:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return theirs, ours


def _authorities(path: str) -> list[dict[str, Any]]:
    """Returns the authorities of a file; [] if it cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(OSError):
        context.load_verify_locations(expanded(path))
    return context.get_ca_certs()


def _check(found: Sequence[Mapping[str, Any]], flag: str, path: str, again: str) -> None:
    """Raises UsageError if none of the certificates is valid at present; a file of authorities may
    have an old one beside the one that takes its place.
    """
    now = time.time()
    times = [[ssl.cert_time_to_seconds(one[key]) for key in _TIMES] for one in found]
    if not times or any(since - _OTHER_CLOCK_S <= now < until for since, until in times):
        return
    since, until = times[-1]
    what, first = ("is not valid yet", "set the clock, or ") if now < since else ("has expired", "")
    raise UsageError(
        f"--{flag} {path} {what}: it is valid from {_said(since)} to {_said(until)}, and the clock "
        f"of this machine says {_said(now)}: {first}{again}"
    )


def _said(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
