# SPDX-License-Identifier: Apache-2.0
"""What the system grants to a program: processor cores, open files and connections, memory.

torchrun tells each process that it starts its place in environment variables. A process's standard
streams may lead to a terminal that goes away: a window, a session of ssh. Free memory is what the
machine has left, or less where a control group limits it. Control groups form a tree, and the limit
of every group above the process's own holds too; a process that exceeds one is killed without a
word.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchbeast.errors import UsageError

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_SHARE = "TORCHBEAST_CORES"
_WHERE_NO_LIMIT_IS = 10_240
_MANY = 1 << 30  # where there is no limit
_STREAMS = (0, 1, 2)
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


def available_cores() -> int:
    """Returns the number of cores this process may use; containers and taskset limit it, and so
    does a program that starts several others, see `environment_of_share`. Learners that torchrun
    starts on one machine share its cores.
    """
    share = os.environ.get(_SHARE, "")
    return min(int(share), _cores()) if share.isdecimal() and int(share) else _cores()


def _cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // learners_here())


def environment_of_share(cores: int) -> Mapping[str, str]:
    """Returns the environment variables of a process that uses at most so many cores.

    The system still chooses the cores: a process that was bound to one would wait there for others.
    """
    return {_SHARE: str(cores), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}


class Launch(NamedTuple):
    """This process among those of a run."""

    rank: int  # 0, ..., size - 1
    size: int  # number of processes, on all machines
    local_rank: int  # among those on this machine
    local_size: int  # number of processes on this machine


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns this process's place; None if it is the only one, with torchrun or without.

    Raises UsageError where there are several, but not all that they need to meet is set.
    """
    size = _number_of("WORLD_SIZE", environ)
    if size < 2:
        return None
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start the learners with "
            "torchrun, or one learner without WORLD_SIZE"
        )
    rank = int(environ["RANK"])
    local_rank = int(environ.get("LOCAL_RANK", rank))
    return Launch(rank, size, local_rank, learners_here(environ))


def learners_here(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that torchrun started on this machine; 1 without it."""
    return _number_of("LOCAL_WORLD_SIZE", environ)


def _number_of(name: str, environ: Mapping[str, str]) -> int:
    """Returns a number of processes that torchrun has set; 1 without it."""
    number = environ.get(name, "")
    return max(1, int(number)) if number.isdecimal() else 1


def check_alone(program: str) -> None:
    """Raises UsageError if torchrun has started a program several times that runs only once."""
    size = _number_of("WORLD_SIZE", os.environ)
    if size > 1:
        raise UsageError(
            f"{program} runs in one process, but {size} were started (WORLD_SIZE): start it "
            "without torchrun. For several learners that train together: torchrun "
            "--nproc_per_node=2 -m torchbeast.polybeast_learner"
        )


def allow_descriptors(most: int | None = None) -> None:
    """Raises this process's limit of open files and connections as far as its user may, up to
    `most`; None: as far as it goes, or to 10,240 where it has no end, which macOS takes for the
    most that it grants.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    wanted = (most or _WHERE_NO_LIMIT_IS) if hard == endless else min(hard, most or hard)
    if soft != endless and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """Puts this process's limit back at the end, as far as its user still may."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def allowed_descriptors() -> int:
    """Returns how many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft


def leave_lost_terminal(pipes: bool = False) -> None:
    """Lets what is printed to a terminal that is gone vanish, instead of failing.

    Nothing is locked, so that a handler of signals may call it.

    pipes: also what is printed to a pipe that nobody reads any more.
    """
    lost = [stream for stream in _STREAMS if is_lost(stream, pipes)]
    if not lost:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in lost:
        os.dup2(nothing, stream)
    os.close(nothing)


def is_lost(stream: int, pipes: bool) -> bool:
    """Returns whether a stream leads to a terminal that is gone; pipes: or to no reader."""
    poll = select.poll()
    poll.register(stream, 0)  # reports the absence of the other end only
    gone = any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))
    return gone and (pipes or stat.S_ISCHR(os.fstat(stream).st_mode))


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
        f"replay_size {size} needs {in_bytes(size * each)} of memory, {each:,} bytes a step, and "
        f"{in_bytes(buffers)} for other buffers, but {in_bytes(free)} are free on this machine: "
        f"give at most replay_size {most}"
    )


def check_buffers(buffers: int, free: int | None) -> None:
    """Raises UsageError if the rollouts of a source, with these bytes, do not fit."""
    if free is not None and buffers > free:
        raise UsageError(
            f"the rollout buffers need {in_bytes(buffers)} of memory, but {in_bytes(free)} are "
            "free on this machine: give a smaller batch_size, a smaller unroll_length or fewer "
            "num_actors"
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
