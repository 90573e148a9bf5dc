# SPDX-License-Identifier: Apache-2.0
"""Only their owner can reach sockets, and a path that is too long is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from torchbeast.errors import UsageError
from torchbeast.servers.addresses import run_folder, server_addresses, socket_path, user_basename


def test_the_address_of_server_i_is_the_basename_and_i() -> None:
    assert server_addresses("unix:/tmp/polybeast", 2) == [
        "unix:/tmp/polybeast.0",
        "unix:/tmp/polybeast.1",
    ]


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    longest = "unix:/" + "a" * (107 - len("/.9"))
    assert len(server_addresses(longest, 10)) == 10
    with pytest.raises(UsageError, match="has 108 bytes, more than the 107 of a Unix socket"):
        server_addresses(longest, 11)


def test_tcp_addresses_are_no_files() -> None:
    assert socket_path("localhost:1234") is None
    assert socket_path("unix:/tmp/a.0") == Path("/tmp/a.0")


def test_two_runs_never_meet_and_their_folders_are_private() -> None:
    with run_folder() as one, run_folder() as two:
        assert one != two
        assert stat.S_IMODE(os.stat(one).st_mode) == 0o700


def test_two_terminals_of_one_user_meet() -> None:
    assert user_basename() == user_basename()


def test_without_a_runtime_folder_the_user_has_a_private_one_under_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    basename = user_basename()
    (folder,) = tmp_path.iterdir()
    assert basename == f"unix:{folder}/polybeast"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "torchbeast").mkdir()
    (tmp_path / "torchbeast").chmod(0o777)
    with pytest.raises(UsageError, match="not a private folder of this user"):
        user_basename()


def test_a_link_to_another_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "torchbeast").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="not a private folder of this user"):
        user_basename()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / "torchbeast"
    place.touch() if kind == "file" else place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a private folder of this user"):
        user_basename()


@pytest.mark.parametrize("make", [run_folder, user_basename])
def test_without_a_place_for_temporary_files_the_remedy_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a container may be read-only."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(UsageError, match="set TMPDIR to a folder"):
        make()
