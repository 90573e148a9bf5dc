# SPDX-License-Identifier: Apache-2.0
"""The last checkpoints of a run. If the newest is damaged, the one before takes its place.

model.tar      the newest
model.1.tar    the one before
model.2.tar    the one before that

Files with such names in the folder of a run belong to it: those that are too old are removed. One
that comes after a gap of two numbers does not count.

The newest is there at any moment from the first save on, whenever the process or the machine ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.errors import RunError, UsageError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.reporting.run_folder import replaced_atomically


class Found(NamedTuple):
    """A checkpoint that could be read, and the newer ones that could not."""

    checkpoint: dict[str, Any]
    path: Path
    damaged: Sequence[checkpoints.Damaged] = ()


def numbered(newest: Path, number: int) -> Path:
    """Returns the path of the checkpoint that was written `number` saves before the newest."""
    return newest.with_name(f"{newest.stem}.{number}{newest.suffix}") if number else newest


def existing(newest: Path) -> list[Path]:
    """Returns the checkpoints that exist, the newest first."""
    return [*([newest] if newest.exists() else []), *_older(newest)]


def write(newest: Path, data: bytes | memoryview, keep: int) -> None:
    """Writes a checkpoint as the newest, and keeps so many in all.

    On an OSError, such as that of a full disk, all earlier ones are still there.
    """
    with replaced_atomically(newest) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # it is safe on the disk before others change their names
        _shift(newest, keep)
    for path in _older(newest)[keep - 1 :]:
        path.unlink()


def load_newest(newest: Path, needed: Sequence[str] = checkpoints.KEYS) -> Found:
    """Reads the newest checkpoint that is not damaged.

    Raises as `checkpoint.load` does, and UsageError where all are damaged, or RunError where the
    disk says so of all: it names each.
    """
    damaged: list[checkpoints.Damaged] = []
    for path in existing(newest) or [newest]:
        try:
            return Found(checkpoints.load(path, needed), path, damaged)
        except checkpoints.Damaged as error:
            damaged.append(error)
    is_disk = all(isinstance(error, checkpoints.Unreadable) for error in damaged)
    if len(damaged) == 1 and not is_disk:
        raise damaged[0]
    kind = RunError if is_disk else UsageError  # one of a network may only be away
    raise kind(
        f"no checkpoint of {newest.parent} can be read: {_listed(damaged)}; move them away to "
        "begin anew"
    )


def put_in_place(found: Found, newest: Path) -> None:
    """Makes what was found the newest; damaged ones get the ending .damaged and count no more.

    For the process that writes the run's next checkpoint, before it does.
    """
    for error in found.damaged:
        os.replace(error.path, _kept_as(error.path))
    if found.path != newest:
        os.replace(found.path, newest)


def sentence(found: Found, newest: Path) -> str:
    """Says which checkpoint takes the place of the newest, and why; "" if it is the newest."""
    if found.path == newest:
        return ""
    why = _listed(found.damaged) if found.damaged else f"there is no {newest}"
    return f"{why}: the checkpoint before, {found.path}, takes its place"


def kept_as(found: Found) -> str:
    """Says where `put_in_place` leaves the damaged ones; "" without any."""
    names = ", ".join(str(_kept_as(error.path)) for error in found.damaged)
    return f"; what is damaged is now {names}" if names else ""


def _older(newest: Path) -> list[Path]:
    """Returns those before the newest, the last one first.

    A save that is cut off leaves out one number at most.
    """
    found: list[Path] = []
    number = last = 0
    while number < last + 2:
        number += 1
        if (path := numbered(newest, number)).exists():
            found.append(path)
            last = number
    return found


def _shift(newest: Path, keep: int) -> None:
    """Gives every checkpoint the name of the one before it; the newest has both names then."""
    second = numbered(newest, 1)
    if keep == 1 or not newest.exists() or (second.exists() and second.samefile(newest)):
        return  # the same file: the last save ended between this and its end
    made = _linked(newest)  # first, because a disk may have no room for it
    for number in range(keep - 2, 0, -1):
        if (path := numbered(newest, number)).exists():
            os.replace(path, numbered(newest, number + 1))
    os.replace(made, second)


def _linked(newest: Path) -> Path:
    """Gives the newest a second name, or copies it to that where there are no links."""
    made = newest.with_name(f"{newest.name}.before")
    made.unlink(missing_ok=True)
    try:
        os.link(newest, made)
        return made
    except OSError:
        pass
    try:
        with newest.open("rb") as old, made.open("wb") as copy:
            shutil.copyfileobj(old, copy)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        made.unlink(missing_ok=True)
        raise
    return made


def _kept_as(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _listed(damaged: Sequence[checkpoints.Damaged]) -> str:
    return ", ".join(f"{error.path} is damaged ({error.reason})" for error in damaged)
