# SPDX-License-Identifier: Apache-2.0
"""TLS of the two ends, from the files that the flags name."""

from __future__ import annotations

import ssl
from pathlib import Path

from torchbeast.sources.servers.config import LearnerSecurityConfig, ServerSecurityConfig


def of_door(files: ServerSecurityConfig) -> ssl.SSLContext | None:
    """Returns the TLS of the end that listens; None without TLS. The files were checked."""
    if files.tls_cert is None or files.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_path(files.tls_cert), _path(files.tls_key))
    if files.tls_client_ca is not None:
        context.load_verify_locations(_path(files.tls_client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def of_host(files: LearnerSecurityConfig) -> ssl.SSLContext | None:
    """Returns the TLS of the end that dials; None without TLS. The files were checked."""
    if files.tls_ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(_path(files.tls_ca))
    context.set_alpn_protocols(["h2"])  # a door chooses none; servers of gRPC do, and are no door
    if files.tls_cert is not None and files.tls_key is not None:
        context.load_cert_chain(_path(files.tls_cert), _path(files.tls_key))
    return context


def _path(name: str) -> Path:
    return Path(name).expanduser()
