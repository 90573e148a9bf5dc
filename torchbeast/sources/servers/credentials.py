# SPDX-License-Identifier: Apache-2.0
"""Reads the files that protect connections between machines, and checks them at the start.

Only names of files are passed to other processes, which read them again.
"""

from __future__ import annotations

import os
import shlex
import ssl
import stat

import libtorchbeast
from torchbeast.errors import UsageError, expanded
from torchbeast.sources.servers.config import (
    MAX_TOKEN,
    MIN_TOKEN,
    LearnerSecurityConfig,
    ServerSecurityConfig,
)

_KEYS = "python -m torchbeast.keys makes one"


def server_credentials(files: ServerSecurityConfig) -> libtorchbeast.Credentials:
    """Returns the credentials of environment servers; raises UsageError for unusable files."""
    return _credentials(
        files.tls_client_ca, "tls_client_ca", files.tls_cert, files.tls_key, files.token_file
    )


def learner_credentials(files: LearnerSecurityConfig) -> libtorchbeast.Credentials:
    """Returns the credentials of a learner; raises UsageError for unusable files."""
    return _credentials(files.tls_ca, "tls_ca", files.tls_cert, files.tls_key, files.token_file)


def _credentials(
    ca: str | None, ca_flag: str, cert: str | None, key: str | None, token: str | None
) -> libtorchbeast.Credentials:
    if cert is not None and key is not None:
        _check_pair(cert, key)
    return libtorchbeast.Credentials(
        ca="" if ca is None else _authority(ca, ca_flag),
        certificate="" if cert is None else _text(cert, "tls_cert"),
        key="" if key is None else _private_text(key, "tls_key"),
        token="" if token is None else read_token(token),
    )


def _authority(path: str, flag: str) -> str:
    text = _text(path, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"--{flag} {path} has no certificate in PEM: {_KEYS}") from None
    return text


def _check_pair(cert: str, key: str) -> None:
    """Raises UsageError unless the key belongs to the certificate."""
    _text(cert, "tls_cert"), _private_text(key, "tls_key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            expanded(cert), expanded(key), password=_no_password
        )
    except _HasPassword:
        raise UsageError(
            f"--tls_key {key} is protected by a password, which nobody could type when a server "
            "is replaced: give a key without one"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key is not that of the certificate {cert}: give the two of one pair"
        else:
            why = f"it and {cert} are no key and certificate in PEM: {_KEYS}"
        raise UsageError(f"--tls_key {key}: {why}") from None


class _HasPassword(Exception):
    """OpenSSL asked for a password."""


def _no_password() -> str:
    raise _HasPassword


def read_token(path: str) -> str:
    """Returns the token of --token_file; raises UsageError for a file that has none."""
    token = _private_text(path, "token_file").strip()
    if (
        not MIN_TOKEN <= len(token) <= MAX_TOKEN
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise UsageError(
            f"--token_file {path} must contain one word of {MIN_TOKEN} to {MAX_TOKEN} printable "
            f"ASCII characters, and it has something else: {_KEYS}"
        )
    return token


def _private_text(path: str, flag: str) -> str:
    text, status = _text(path, flag), expanded(path).stat()
    # As PostgreSQL has it: a file of the administrator may be for a group, as Kubernetes mounts it.
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
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"--{flag} {path} cannot be read ({reason}): give the name of a file that can"
        ) from None
