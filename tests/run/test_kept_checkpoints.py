# SPDX-License-Identifier: Apache-2.0
"""A run keeps its last checkpoints, and goes on from the newest that is not damaged."""

from __future__ import annotations

import errno
import os
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_learner_run import BAD, GOOD, train
from test_training import B, T

from torchbeast.errors import RunError, UsageError
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.checkpoint_writer import CheckpointNotWritten, CheckpointWriter
from torchbeast.run.config import CheckpointConfig

NEEDED = ("step",)


def write(newest: Path, step: int, keep: int = 3) -> None:
    weights = torch.arange(step, step + 1000.0)
    data = checkpoints.as_bytes({"step": step, "weights": weights})
    checkpoints.write_newest(newest, data, keep)


def steps(newest: Path) -> dict[str, int]:
    """The step of every file in the folder, by name; -1 where it is none."""
    return {path.name: step_of(path) for path in sorted(newest.parent.iterdir())}


def step_of(path: Path) -> int:
    try:
        return int(checkpoints.load(path, NEEDED)["step"])
    except UsageError:
        return -1


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    return tmp_path / "model.tar"


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_last_ones_are_kept_and_no_more(newest: Path, keep: int) -> None:
    for step in range(1, 8):
        write(newest, step, keep)
        expected = {"model.tar": step}
        expected |= {f"model.{n}.tar": step - n for n in range(1, min(keep, step))}
        assert steps(newest) == expected


def test_a_smaller_number_removes_those_that_are_too_old(newest: Path) -> None:
    for step in range(1, 6):
        write(newest, step, keep=5)
    write(newest, 6, keep=2)
    assert steps(newest) == {"model.tar": 6, "model.1.tar": 5}


def test_a_file_system_without_links_keeps_as_many(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2, 3, 4):
        write(newest, step)
    assert steps(newest) == {"model.tar": 4, "model.1.tar": 3, "model.2.tar": 2}


def test_a_file_that_only_looks_like_an_older_checkpoint_is_left_alone(newest: Path) -> None:
    mine = newest.with_name("model.5000000.tar")
    mine.write_text("mine")
    for step in range(1, 6):
        write(newest, step)
    assert mine.read_text() == "mine"
    assert checkpoints.existing(newest)[-1].name == "model.2.tar"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_a_machine_that_cannot_read_now_does_not_make_a_file_damaged(
    newest: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write(newest, 1)
    write(newest, 2)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RunError, match=r"model\.tar could not be read .* may be intact") as found:
        checkpoints.load_newest(newest, NEEDED)
    assert "Errno" not in str(found.value) and "Allocator" not in str(found.value)


@pytest.mark.parametrize("reading", ["testzip", "__init__"])
def test_the_one_before_takes_the_place_of_one_on_a_bad_sector(
    newest: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    """The bad sector lies in a record, or in the list of records at the file's end."""
    for step in (1, 2):
        write(newest, step)
    read, bad = getattr(zipfile.ZipFile, reading), newest.stat().st_ino

    def failing(self: zipfile.ZipFile, *args: Any, **kwargs: Any) -> Any:
        file: Any = args[0] if args else self.fp
        if os.fstat(file.fileno()).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, reading, failing)
    alone = newest.rename(newest.with_name("alone.tar"))
    with pytest.raises(RunError, match="no checkpoint in .* can be read"):
        checkpoints.load_newest(alone, NEEDED)
    alone.rename(newest)
    found = checkpoints.load_newest(newest, NEEDED)
    assert found.checkpoint["step"] == 1
    said = checkpoints.describe_fallback(found, newest)
    assert f"{newest} is damaged (disk error: Input/output error)" in said
    checkpoints.put_in_place(found, newest)
    assert newest.stat().st_ino != bad
    assert newest.with_name("model.tar.damaged").stat().st_ino == bad


def test_a_checkpoint_that_is_asked_for_by_name_is_read_alone(tmp_path: Path) -> None:
    """Snapshots beside it are no older ones of it, and keep their names."""
    train(tmp_path, GOOD)
    own = tmp_path / "run" / "model.tar"
    snapshots = [tmp_path / f"ckpt.{n}.tar" for n in (1, 2)]
    for path in snapshots:
        shutil.copyfile(own, path)
    with pytest.raises(UsageError, match="there is no checkpoint at .*ckpt.tar"):
        checkpoints.load_newest(tmp_path / "ckpt.tar")  # as evaluations and exports do
    with pytest.raises(UsageError, match="there is no checkpoint at .*ckpt.tar"):
        train(tmp_path, GOOD, resumed=tmp_path / "ckpt.tar")
    snapshots[0].write_bytes(b"cut off")
    with pytest.raises(checkpoints.Damaged):
        train(tmp_path, GOOD, resumed=snapshots[0])
    train(tmp_path, GOOD, resumed=snapshots[1])
    assert [path.exists() for path in snapshots] == [True, True]


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("link", 1),
        *[(name, call) for name in ("replace", "fsync", "unlink") for call in (1, 2)],
        ("open", 1),
    ],
)
def test_a_save_that_fails_anywhere_loses_no_earlier_one(
    newest: Path, monkeypatch: pytest.MonkeyPatch, where: str, call: int
) -> None:
    """The fault is in the given call of the function in that save; the next save has none."""
    for step in (1, 2, 3):
        write(newest, step)
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return body

    with monkeypatch.context() as patch:
        patch.setattr(os, where, failing(getattr(os, where)))
        try:
            write(newest, 4)
        except OSError as error:
            assert "No space" in str(error)
    assert calls >= call, "no fault occurred"
    left = steps(newest)
    assert left["model.tar"] in (3, 4), left
    assert {2, 3} <= set(left.values()), left
    assert not [name for name in left if name.endswith(".tmp")]
    write(newest, 5)
    assert step_of(newest) == 5 and {3, 5} <= set(steps(newest).values())


def test_a_process_that_ends_between_two_names_loses_nothing(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rename is left out, as by SIGKILL; the next save does not keep one file twice."""
    for step in (1, 2, 3):
        write(newest, step)
    replace = os.replace
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(source: Any, target: Any) -> None:
            if Path(target) == newest:
                raise KeyboardInterrupt
            replace(source, target)

        patch.setattr(os, "replace", killed)
        write(newest, 4)
    assert steps(newest) == {"model.tar": 3, "model.1.tar": 3, "model.2.tar": 2}
    write(newest, 5)
    assert steps(newest) == {"model.tar": 5, "model.1.tar": 3, "model.2.tar": 2}


# --- damage


def test_every_changed_byte_is_noticed_or_changes_nothing(newest: Path) -> None:
    """torch.load alone would return other weights for most of them."""
    write(newest, 7)
    whole, rng = newest.read_bytes(), random.Random(1)
    noticed = 0
    for position in rng.sample(range(len(whole)), 300):
        changed = bytearray(whole)
        changed[position] ^= 1 << rng.randrange(8)
        newest.write_bytes(changed)
        try:
            saved = checkpoints.load(newest, NEEDED)
        except checkpoints.Damaged as error:
            noticed += 1
            assert str(newest) in str(error) and "\n" not in str(error)
        else:
            assert torch.equal(saved["weights"], torch.arange(7, 1007.0)) and saved["step"] == 7
    assert noticed > 150, "most bytes are weights"


class Foreign:
    """A class that no checkpoint contains."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.write_bytes(b"x" * 5000), "it is truncated, or not a checkpoint"),
        (lambda path: path.write_bytes(path.read_bytes()[:-700]), "it is truncated, or not"),
        (lambda path: path.write_bytes(path.read_bytes()[:3]), "it is truncated, or not"),
        (lambda path: (path.unlink(), path.mkdir()), "it is a folder"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "its contents are invalid"),
        (lambda path: torch.save(Foreign(), path), "it contains .*Foreign, but only tensors and"),
    ],
    ids=["empty", "something else", "truncated", "a stub", "folder", "empty archive", "a class"],
)
def test_the_reason_is_a_plain_sentence(
    newest: Path, make: Callable[[Path], object], reason: str
) -> None:
    write(newest, 7)
    make(newest)
    with pytest.raises(
        checkpoints.Damaged, match=rf"model\.tar is not a valid .* \({reason}"
    ) as error:
        checkpoints.load(newest, NEEDED)
    for scary in ("Errno", "Pytorch", "PyTorch", "weights_only", "pickle", "zip", "\n"):
        assert scary not in str(error.value)


def test_every_truncated_file_is_noticed(newest: Path) -> None:
    write(newest, 7)
    whole = newest.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        newest.write_bytes(whole[:length])
        with pytest.raises(checkpoints.Damaged):
            checkpoints.load(newest, NEEDED)


def test_the_checksum_is_that_of_zip_and_travels_with_the_file(newest: Path) -> None:
    """An independent reader: the weights' bytes stand in the file beside their CRC-32."""
    write(newest, 7)
    whole = newest.read_bytes()
    weights = torch.arange(7, 1007.0).numpy().tobytes()
    assert weights in whole
    assert whole.count(zlib.crc32(weights).to_bytes(4, "little")) >= 1
    copy = newest.with_name("elsewhere.tar")
    shutil.copy(newest, copy)
    assert torch.load(copy, weights_only=True)["step"] == 7
    changed = bytearray(whole)
    changed[whole.index(weights) + 100] ^= 1
    copy.write_bytes(changed)
    assert torch.load(copy, weights_only=True)["step"] == 7, "torch does not look at it"
    with pytest.raises(checkpoints.Damaged, match="checksum of its record"):
        checkpoints.load(copy, NEEDED)


@pytest.mark.parametrize("zip_file", [True, False])
def test_a_file_of_torch_save_loads_in_its_older_form_too(newest: Path, zip_file: bool) -> None:
    """Before PyTorch 1.6 it was no archive and had no checksum."""
    torch.save({"step": 9}, newest, _use_new_zipfile_serialization=zip_file)
    assert step_of(newest) == 9


def test_checksums_are_written_where_somebody_has_turned_them_off(newest: Path) -> None:
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this PyTorch always writes them")
    torch.serialization.set_crc32_options(False)
    try:
        write(newest, 7)
    finally:
        torch.serialization.set_crc32_options(True)
    assert step_of(newest) == 7


def damage(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize("bad", [1, 2])
def test_the_newest_that_is_not_damaged_is_found(newest: Path, bad: int) -> None:
    for step in (1, 2, 3):
        write(newest, step)
    for number in range(bad):
        damage(checkpoints.numbered(newest, number))
    found = checkpoints.load_newest(newest, NEEDED)
    assert found.checkpoint["step"] == 3 - bad
    said = checkpoints.describe_fallback(found, newest)
    for number in range(bad + 1):
        assert str(checkpoints.numbered(newest, number)) in said
    assert said.count(" is damaged (") == bad


def test_what_was_found_is_the_newest_at_once_and_damaged_ones_do_not_count(newest: Path) -> None:
    for step in (1, 2, 3):
        write(newest, step)
    damage(newest)
    checkpoints.put_in_place(checkpoints.load_newest(newest, NEEDED), newest)
    assert steps(newest) == {"model.tar": 2, "model.2.tar": 1, "model.tar.damaged": -1}
    write(newest, 4)
    assert [step_of(path) for path in checkpoints.existing(newest)] == [4, 2, 1]


def test_where_all_are_damaged_the_error_names_each(newest: Path) -> None:
    for step in (1, 2, 3):
        write(newest, step)
    paths = checkpoints.existing(newest)
    assert len(paths) == 3
    for path in paths:
        damage(path)
    with pytest.raises(UsageError, match="move them away to start over") as error:
        checkpoints.load_newest(newest, NEEDED)
    assert all(str(path) in str(error.value) for path in paths)


def test_a_later_format_is_no_damage(newest: Path) -> None:
    """Going back to an older one would silently lose what a newer TorchBeast has learnt."""
    write(newest, 1)
    checkpoints.write_newest(newest, checkpoints.as_bytes({"step": 2, "format": 99}), 3)
    with pytest.raises(UsageError, match="has format 99"):
        checkpoints.load_newest(newest, NEEDED)


# --- runs


def run_steps(folder: Path) -> int:
    return int(checkpoints.load(folder / "run" / "model.tar")["stats"]["step"])


def test_a_run_goes_on_from_the_one_before_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = tmp_path / "run" / "model.tar"
    train(tmp_path, GOOD)
    train(tmp_path, GOOD)
    damage(newest)
    torn = newest.read_bytes()
    train(tmp_path, GOOD)
    captured = capsys.readouterr()
    (said,) = [line for line in captured.err.splitlines() if line.startswith("Warning")]
    assert f"{newest} is damaged (" in said
    assert f"using the previous checkpoint, {tmp_path / 'run' / 'model.1.tar'}" in said
    assert f"damaged files are now {newest}.damaged" in said
    assert "using the previous checkpoint" in (tmp_path / "run" / "out.log").read_text()
    assert run_steps(tmp_path) == 2 * T * B
    assert [row["step"] for row in read_logs(tmp_path / "run")] == [T * B, 2 * T * B]
    assert newest.with_name("model.tar.damaged").read_bytes() == torn
    before = checkpoints.load(newest.with_name("model.1.tar"))
    assert before["stats"]["step"] == T * B


def test_a_run_whose_newest_is_gone_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """As where a copy of the folder was not complete. Beginning anew would replace its log."""
    train(tmp_path, GOOD)
    train(tmp_path, GOOD)
    (tmp_path / "run" / "model.tar").unlink()
    train(tmp_path, GOOD)
    assert run_steps(tmp_path) == 2 * T * B


def test_a_run_keeps_as_many_as_its_flag_says(tmp_path: Path) -> None:
    keep_two = {"checkpoints": CheckpointConfig(keep_checkpoints=2)}
    for _ in range(4):
        train(tmp_path, GOOD, groups=keep_two)
    assert {path.name for path in (tmp_path / "run").glob("*.tar")} == {"model.tar", "model.1.tar"}


def test_a_nan_leaves_all_checkpoints(tmp_path: Path) -> None:
    for _ in range(3):
        train(tmp_path, GOOD)
    with pytest.raises(RunError, match="loss is nan"):
        train(tmp_path, BAD)
    found = checkpoints.existing(tmp_path / "run" / "model.tar")
    assert [checkpoints.load(path)["stats"]["step"] for path in found] == [
        n * T * B for n in (3, 2, 1)
    ]


@pytest.mark.parametrize(
    ("number", "free_mb", "inodes", "remedy"),
    [
        (errno.ENOSPC, 3, 9, "free some space there for 4.0 MB, 3.0 MB are free"),
        (errno.ENOSPC, 3, None, "free some space there for 4.0 MB, 3.0 MB are free"),
        (errno.ENOSPC, 34, 0, "delete files there, because the file system has no free inodes"),
        (errno.ENOSPC, 34, 9, "delete files there, because a quota is used up"),
        (errno.EDQUOT, 3, 9, "delete files there, because a quota is used up"),
    ],
)
def test_a_full_disk_is_a_sentence_with_the_room_that_is_needed(
    number: int,
    free_mb: int,
    inodes: int | None,  # None: the file system does not count them
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Folder:
        checkpoint = tmp_path / "model.tar"

        def check_is_ours(self) -> None:
            pass

    def checkpoint() -> dict[str, Any]:
        return {"weights": torch.zeros(10**6)}

    checkpoint_writer = CheckpointWriter(Folder(), {}, CheckpointConfig(keep_checkpoints=2))  # type: ignore[arg-type]

    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    free = SimpleNamespace(
        f_bavail=free_mb * 1000,
        f_frsize=1000,
        f_files=0 if inodes is None else 99,
        f_favail=inodes or 0,
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(os, "statvfs", lambda _: free)
        with pytest.raises(CheckpointNotWritten) as error:
            checkpoint_writer.save(checkpoint)
    said = str(error.value)
    assert f"no checkpoint was written to {Folder.checkpoint} ({os.strerror(number)})" in said
    assert f"there is none yet: {remedy}" in said

    def refuse(_: int) -> None:
        raise OSError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(
            CheckpointNotWritten, match=r"\(Permission denied\); there is none yet$"
        ):
            checkpoint_writer.save(checkpoint)
    checkpoint_writer.save(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["model.tar"]
