# SPDX-License-Identifier: Apache-2.0
"""The memory that is free for a program, checks that rollouts and a replay fit it, and a setting
of the C library that keeps freed memory.

Free is what the machine has left, or less where a control group limits it.

Containers and job schedulers limit memory by control groups, which form a tree: the limit of every
group above the process's own holds too. A process that exceeds one is killed without a word.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from torchbeast.errors import UsageError

_TUNED_BY = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
# From <malloc.h>: the number of blocks that may be allocated by mmap, and the size of a heap's free
# end at which it is returned to the system.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = -1

_MOST = 0.9  # of the free memory, so that something is left for the rest of the program

# Of the two versions of control groups: folder, limit, use, and entries of memory.stat that are
# files in the page cache, which the kernel drops when memory is needed.
_VERSIONS = {
    "": (("", "unified"), "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        ("memory",),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still use; None where the system does not tell.

    root: where the files of the system are.
    """
    return min([*_of_the_machine(root), *_of_control_groups(root)], default=None)


def check_memory(size: int, each: int, buffers: int, free: int | None) -> None:
    """Raises UsageError if a replay of `size` steps, `each` bytes a step, does not fit beside the
    other buffers.
    """
    if free is None or size * each + buffers <= _MOST * free:
        return
    most = max(0, int(_MOST * free) - buffers) // each
    raise UsageError(
        f"--replay_size {size} needs {in_bytes(size * each)} of memory, {each:,} bytes a step, and "
        f"{in_bytes(buffers)} for other buffers, but {in_bytes(free)} are free on this machine: "
        f"give at most --replay_size {most}"
    )


def check_buffers(buffers: int, free: int | None) -> None:
    """Raises UsageError if the rollouts of a source, with these bytes, do not fit."""
    if free is not None and buffers > free:
        raise UsageError(
            f"the rollouts that are written, wait and are learnt from take {in_bytes(buffers)} of "
            f"memory, but {in_bytes(free)} are free on this machine: give a smaller --batch_size, "
            "a smaller --unroll_length or fewer --num_actors"
        )


def in_bytes(count: float) -> str:
    """Formats a number of bytes as "7.1 GB", or "2.3 MB" where it is small."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _of_the_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])
            return
    if "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all there is, free or not
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups(root: Path) -> Iterator[int]:
    """What is left in each group that limits this process."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in {*controllers.split(",")} & set(_VERSIONS):
            folders, limit, use, cached = _VERSIONS[name]
            for folder in folders:
                for group in _upwards(root / "sys/fs/cgroup" / folder, path):
                    yield from _left_in(group, limit, use, cached)


def _upwards(base: Path, path: str) -> Iterator[Path]:
    """The group and all above it. In a container the base may be the group itself."""
    group = base / path.strip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _left_in(group: Path, limit: str, use: str, cached: tuple[str, ...]) -> Iterator[int]:
    most, used = _number(group / limit), _number(group / use)
    if most is not None and used is not None:
        stat = dict(line.split() for line in _lines(group / "memory.stat"))
        yield max(0, most - used + sum(int(stat.get(name, 0)) for name in cached))


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def keep_freed_memory(device: str = "cpu") -> None:
    """Lets all threads of this process keep freed memory from now on, instead of returning it to
    the system. A no-op without glibc, and where the user tunes malloc with one of _TUNED_BY.

    Networks on the CPU allocate and free megabytes for every operation. By default glibc returns
    such blocks to the system and gets new ones, with a page fault for each page, which took a tenth
    of the time of an update. The price is that no heap ever shrinks. Threads other than the main
    one have heaps of 64 MiB; all but a thread's first are still returned when empty.

    It cannot be undone, so it is for processes of our own only. device: the type of
    the device that the process computes on; a no-op for a GPU.
    """
    if device != "cpu":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _TUNED_BY):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
