# SPDX-License-Identifier: Apache-2.0
"""Files of credentials that cannot be used are refused at once, in a sentence without secrets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from keys_of_tests import TOKEN, Keys, write

from torchbeast.errors import UsageError
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials as credentials_of
from torchbeast.servers.security import flags_of_others


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def complete(keys: Keys) -> dict[str, Any]:
    return {
        "tls_cert": keys.cert,
        "tls_key": keys.key,
        "tls_client_ca": keys.ca,
        "token_file": keys.token,
    }


def test_usable_files_are_read(keys: Keys) -> None:
    server = credentials_of(SecurityConfig(**complete(keys)))
    assert repr(server) == "Credentials(ca=True, certificate=True, key=True, token=True)"
    learner = credentials_of(SecurityConfig(tls_ca=keys.ca))
    assert repr(learner) == "Credentials(ca=True, certificate=False, key=False, token=False)"


def test_comments_beside_a_certificate_may_have_any_letters(keys: Keys, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("# Autorité\n" + Path(keys.ca).read_text(), encoding="utf-8")
    found = credentials_of(SecurityConfig(tls_ca=str(bundle)))
    assert repr(found) == "Credentials(ca=True, certificate=False, key=False, token=False)"


def locked(keys: Keys) -> bytes:
    """Returns the server's key with a password."""
    private = serialization.load_pem_private_key(Path(keys.key).read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"abc")
    return private.private_bytes(serialization.Encoding.PEM, *form)


@pytest.mark.parametrize(
    ("flag", "content", "text"),
    [
        ("tls_cert", lambda _: "no certificate", "is not the key of a certificate"),
        ("tls_key", lambda keys: keys.client_key, "is not the key of a certificate"),
        ("tls_key", lambda _: "no key", "is not the key of a certificate"),
        ("tls_key", locked, "is not the key of .* without a password"),
        ("tls_client_ca", lambda _: "no authority", "has no certificate in PEM"),
        ("token_file", lambda _: "", "one word of 16 to 1000 printable ASCII"),
        ("token_file", lambda _: "fifteen-letters", "one word of 16"),
        ("token_file", lambda _: "a token of several words", "one word of 16"),
        ("token_file", lambda _: "é" * 20, "one word of 16"),
        ("token_file", lambda _: b"\xff" * 20, "it is not text"),
    ],
)
def test_a_file_with_something_else_is_refused(
    keys: Keys, tmp_path: Path, flag: str, content: Callable[[Keys], Any], text: str
) -> None:
    given = content(keys)
    path = given if given == keys.client_key else write(tmp_path / "file", given)
    with pytest.raises(UsageError, match=text) as error:
        credentials_of(SecurityConfig(**complete(keys) | {flag: path}))
    assert path in str(error.value)
    assert TOKEN not in str(error.value) and "several words" not in str(error.value)


@pytest.mark.parametrize("flag", ["tls_cert", "tls_key", "tls_client_ca", "token_file"])
def test_a_missing_file_is_refused_by_its_flag(keys: Keys, tmp_path: Path, flag: str) -> None:
    given = complete(keys) | {flag: str(tmp_path / "none")}
    with pytest.raises(UsageError, match=f"--{flag} .*none cannot be read .No such file"):
        credentials_of(SecurityConfig(**given))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
@pytest.mark.parametrize("flag", ["tls_key", "token_file"])
def test_a_secret_that_others_can_read_is_refused(
    keys: Keys, tmp_path: Path, flag: str, mode: int
) -> None:
    source = Path(complete(keys)[flag])
    path = Path(write(tmp_path / "secret", source.read_bytes()))
    given = complete(keys) | {flag: str(path)}
    credentials_of(SecurityConfig(**given))
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.: make it private, chmod 600 {path}"):
        credentials_of(SecurityConfig(**given))


def test_a_secret_of_the_administrator_may_be_for_a_group(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts secrets so; a file of this user has no reason to be."""
    path = Path(write(tmp_path / "secret", TOKEN))
    path.chmod(0o640)
    owner = path.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: 1000)
    given = SecurityConfig(**complete(keys) | {"token_file": str(path)})
    if owner == 0:
        credentials_of(given)
    else:
        with pytest.raises(UsageError, match="make it private"):
            credentials_of(given)


# --- what the other side is told


def test_others_are_told_the_name_of_this_machine_in_place_of_every_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    listen = ["0.0.0.0:1", "[::]:2", "10.0.0.1:3"]
    said = flags_of_others("--learner", listen, SecurityConfig(insecure=True))
    assert said.startswith("--learner node7:1,node7:2,10.0.0.1:3 ")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"insecure": True}, "--insecure"),
        ({"insecure": True, "token_file": "a token"}, "--insecure --token_file token"),
        (
            {"tls_cert": "c", "tls_key": "k", "token_file": "t"},
            "--tls_ca ca.pem --token_file token",
        ),
        (
            {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"},
            "--tls_ca ca.pem --tls_cert client.pem --tls_key client-key.pem",
        ),
    ],
)
def test_the_flags_of_the_other_side_fit_those_of_this_one(
    own: dict[str, Any], others: str
) -> None:
    said = flags_of_others("--learner", ["a:1", "a:2"], SecurityConfig(**own))
    assert said == f"--learner a:1,a:2 {others}"
