# SPDX-License-Identifier: Apache-2.0
"""The program that makes keys; OpenSSL, which Python's ssl module uses, checks what it makes."""

from __future__ import annotations

import datetime
import os
import re
import socket
import ssl
import stat
import sys
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from keys_of_tests import valid_from

from torchbeast.keys import main, new_authority

FILES = ["ca-key.pem", "ca.pem", "client-key.pem", "client.pem"]
FILES += ["server-key.pem", "server.pem", "token"]


def shake_hands(server: Path, client: Path, name: str) -> None:
    """Connects a client of one folder to a server of another; both check each other."""
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(server / "server.pem", server / "server-key.pem")
    of_server.load_verify_locations(server / "ca.pem")
    of_server.verify_mode = ssl.CERT_REQUIRED
    of_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    of_client.load_cert_chain(client / "client.pem", client / "client-key.pem")
    of_client.load_verify_locations(client / "ca.pem")
    ours, theirs = socket.socketpair()

    def accept() -> None:
        with ours:
            try:
                with of_server.wrap_socket(ours, server_side=True) as accepted:
                    accepted.sendall(b"!")
            except OSError:
                pass

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        with theirs, of_client.wrap_socket(theirs, server_hostname=name) as connected:
            assert connected.recv(1) == b"!"
    finally:
        accepting.join()


def test_the_files_let_servers_and_learner_trust_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["--hosts", "a.lab, 10.0.0.7,[fd00::1]", "--folder", str(folder)]) == 0
    for name in ("a.lab", "10.0.0.7", "fd00::1"):
        shake_hands(folder, folder, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(folder, folder, "b.lab")
    said = capsys.readouterr().out
    assert "to machines that listen     server.pem server-key.pem ca.pem token" in said
    assert (folder / "token").read_text().strip() not in said


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert main(["--hosts", "a", "--folder", str(tmp_path / "keys")]) == 0
    finally:
        os.umask(before)
    made = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in made] == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_second_call_renews_certificates_of_the_same_authority(tmp_path: Path) -> None:
    def read() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    assert main(["--hosts", "a", "--folder", str(tmp_path)]) == 0
    before = read()
    assert main(["--hosts", "a,b", "--folder", str(tmp_path)]) == 0
    after = read()
    kept = {name for name in FILES if before[name] == after[name]}
    assert kept == {"ca-key.pem", "ca.pem", "token"}
    shake_hands(tmp_path, tmp_path, "b")


def test_tokens_and_authorities_of_two_calls_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["--hosts", "a", "--folder", str(tmp_path / name)]) == 0
    assert (tmp_path / "one" / "token").read_text() != (tmp_path / "two" / "token").read_text()
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path / "one", tmp_path / "two", "a")


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_certificate_serves_its_own_side_only(tmp_path: Path, side: str) -> None:
    assert main(["--hosts", "a", "--folder", str(tmp_path)]) == 0
    other = {"server": "client", "client": "server"}[side]
    for suffix in ("", "-key"):
        (tmp_path / f"{side}{suffix}.pem").write_bytes(
            (tmp_path / f"{other}{suffix}.pem").read_bytes()
        )
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake_hands(tmp_path, tmp_path, "a")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "--hosts is required"),
        (["--hosts", " , "], "--hosts is required"),
        (["--hosts", "a:50051"], "'a:50051', which is not the name or address .* without ports"),
        (["--hosts", "a b"], "'a b', which is not the name"),
        (["--hosts", "a..-"], "which is not the name"),
        (["--hosts", "a", "--days", "0"], "--days must be between 1 and 3650, got 0"),
        (["--hosts", "a", "--folder", "/proc/nowhere"], "/proc/nowhere cannot be used"),
    ],
)
def test_wrong_usage_is_one_sentence(
    args: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = args if "--folder" in args else [*args, "--folder", str(tmp_path / "keys")]
    assert main(args) == 2
    said = capsys.readouterr().err
    assert re.search(text, said) and "Traceback" not in said, said


def test_an_authority_that_has_expired_signs_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with valid_from(-datetime.timedelta(days=3651)):
        expired = new_authority()
    (tmp_path / "ca.pem").write_bytes(expired.certificate_pem())
    (tmp_path / "ca-key.pem").write_bytes(expired.key_pem())
    assert main(["--hosts", "a", "--folder", str(tmp_path)]) == 2
    assert (
        "ca.pem has expired, and so have all certificates that it signed: use"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "server.pem").exists()


def test_a_broken_authority_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ca.pem").write_text("broken")
    assert main(["--hosts", "a", "--folder", str(tmp_path)]) == 2
    assert "cannot be reused as an authority" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_text() == "broken"


def test_an_authority_whose_key_has_a_password_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--hosts", "a", "--folder", str(tmp_path)]
    assert main(folder) == 0
    path = tmp_path / "ca-key.pem"
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"abc")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    assert main(folder) == 2
    assert "cannot be reused as an authority" in capsys.readouterr().err


def test_without_cryptography_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--hosts", "a"]) == 2
    assert "pip install 'torchbeast[tls]'" in capsys.readouterr().err
