# SPDX-License-Identifier: Apache-2.0
"""TLS of the door, from the files that the flags name; handshake.py has that of its hosts."""

from __future__ import annotations

import ssl

from torchbeast.errors import expanded
from torchbeast.sources.servers.config import ServerSecurityConfig


def of_door(files: ServerSecurityConfig) -> ssl.SSLContext | None:
    """Returns the TLS of the end that listens; None without TLS. The files were checked."""
    if files.tls_cert is None or files.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(expanded(files.tls_cert), expanded(files.tls_key))
    if files.tls_client_ca is not None:
        context.load_verify_locations(expanded(files.tls_client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context
