# SPDX-License-Identifier: Apache-2.0
"""The resources that the system grants: processor cores, open files and connections, memory.

torchrun describes the place of each of its processes in environment variables. The standard streams
of a process may lead to a terminal that goes away, such as a window or an ssh session. Control
groups, by which containers limit processes, form a tree: the limits of all groups above the
process's own apply as well. The kernel kills a process that exceeds a limit of memory, without a
message, and delays one that exceeds a quota of processor time.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import select
import signal
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from torchbeast.errors import UsageError

_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
_SHARE = "TORCHBEAST_CORES"
_WHERE_NO_LIMIT_IS = 10_240
_MANY = 1 << 30  # stands for no limit
_STREAMS = (0, 1, 2)
_TUNED_BY = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
# From <malloc.h>: the largest number of blocks that are allocated by mmap, and the size of the free
# end of a heap from which on it is returned to the system.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = -1

_MOST = 0.9  # share of free memory to use, so that some is left for the rest of the program

# For the two versions of control groups: limit, usage, and the prefix of the entries of memory.stat
# that count files in the page cache, which the kernel drops when memory is needed.
_OF_MEMORY = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process may use.

    Containers limit it by a set of cores, as taskset does, or by a quota, of which a part of a core
    counts as a core. Programs that start several others limit it, too, see `environment_of_share`.
    Learners that torchrun starts on one machine share its cores.

    root: folder of the system's files.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quotas = [math.ceil(quota) for _, quota in _quotas(root)]
    cores = max(1, min([cores, *quotas]) // _number_of("LOCAL_WORLD_SIZE", os.environ))
    share = os.environ.get(_SHARE, "")
    return min(int(share), cores) if share.isdecimal() and int(share) else cores


def _quotas(root: Path) -> Iterator[tuple[Path, float]]:
    """Yields the control groups that limit this process's time, each with its number of cores."""
    names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # version 2 has the first
    for group in _groups(root, "cpu"):
        words = " ".join(line for name in names for line in _lines(group / name)).split()
        if len(words) == 2 and words[0].isdigit():  # without a quota it is "max" or -1
            yield group, int(words[0]) / int(words[1])


class CoreTime(NamedTuple):
    """Processor time up to some moment, in seconds; only differences of two readings count.

    own: of this process and its descendants, on all cores together; NaN if the system does not say.
    delayed: in which threads of the descendants, or Python's threads of this process, were ready to
        run, but had no core.
    used: of all processes, as a share of the cores that this process may run on, and of each quota
        of its control groups. A second in which all cores are in use adds 1.
    """

    own: float = math.nan
    delayed: float = math.nan
    used: tuple[float, ...] = ()


def core_time(root: Path = Path("/")) -> CoreTime:
    """Reads the processor time of this process, of its descendants and of all others, on Linux.

    It reads a file of every process. root: folder of the system's files.
    """
    proc = str(root / "proc")
    family = _family(proc)
    if not family:
        return CoreTime()
    # Only Python's threads of this process, because streams may have thousands of others.
    delayed = _delay(f"{proc}/{os.getpid()}/task", [t.native_id for t in threading.enumerate()])
    for pid in family.keys() - {os.getpid()}:
        delayed += _delay(tasks := f"{proc}/{pid}/task", _numbers(tasks))
    used = *_use_of_cores(root), *_use_of_quotas(root)
    return CoreTime(sum(family.values()), delayed, used)


def _family(proc: str) -> dict[int, float]:
    """Returns the processor time of this process and of each descendant, by process ID."""
    spent, children = dict[int, float](), dict[int, list[int]]()
    for pid in _numbers(proc):
        # After the name, which may have any bytes: state, parent, ..., times, ...
        words = _content(f"{proc}/{pid}/stat").rpartition(b") ")[2].split()
        with suppress(IndexError):  # it has ended
            spent[pid] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
            children.setdefault(int(words[1]), []).append(pid)
    family = [os.getpid()]
    for pid in family:
        family += children.get(pid, [])
    return {pid: spent[pid] for pid in family if pid in spent}


def _delay(tasks: str, threads: Sequence[int | None]) -> float:
    """Returns the seconds in which threads of a process were ready to run, but had no core."""
    words = [_content(f"{tasks}/{thread}/schedstat").split() for thread in threads]
    return sum(int(delayed) for _, delayed, _ in filter(None, words)) / 1e9


def _numbers(folder: str) -> list[int]:
    """Returns the processes or threads that have a folder here; [] if their process has ended."""
    with suppress(OSError):  # pathlib's glob takes several times as long
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    return []


def _content(path: str) -> bytes:
    """Returns what a file says; nothing if there is none: its process or thread has ended."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read()
    return b""


def _use_of_cores(root: Path) -> Iterator[float]:
    """Yields the seconds in which this process's cores were in use, on average."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in _lines(root / "proc/stat") if line.startswith("cpu")]
    cores = [words for words in lines if words[0] in names]
    # user, nice, system, (idle, waiting for a disk,) interrupts, soft interrupts, virtual machines
    ticks = sum(int(word) for words in cores for word in words[1:4] + words[6:9])
    if cores:
        yield ticks / len(cores) / os.sysconf("SC_CLK_TCK")


def _use_of_quotas(root: Path) -> Iterator[float]:
    """Yields the seconds in which each quota was in use."""
    for group, cores in _quotas(root):
        usage = dict(line.split() for line in _lines(group / "cpu.stat")).get("usage_usec")
        nanoseconds = _number(group / "cpuacct.usage") if usage is None else 1000 * int(usage)
        if nanoseconds is not None:  # of version 1, or of version 2
            yield nanoseconds / 1e9 / cores


def environment_of_share(cores: int) -> Mapping[str, str]:
    """Returns the environment variables of a process that uses at most this number of cores.

    The process is not bound to certain cores, lest it wait for other processes there.
    """
    return {_SHARE: str(cores), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}


class Launch(NamedTuple):
    """The place of this process among the processes of a run."""

    rank: int  # 0, ..., size - 1
    size: int  # number of processes, on all machines
    local_rank: int  # among the processes on this machine
    local_size: int  # number of processes on this machine


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns this process's place; None if it is the only process, with torchrun or without.

    Raises UsageError if there are several processes, and variables that they need are not set.
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
    return Launch(rank, size, local_rank, _number_of("LOCAL_WORLD_SIZE", environ))


def _number_of(name: str, environ: Mapping[str, str]) -> int:
    """Returns a number of processes that torchrun has set, or 1."""
    number = environ.get(name, "")
    return max(1, int(number)) if number.isdecimal() else 1


def check_alone(program: str) -> None:
    """Raises UsageError if torchrun has started several processes of a program that runs in one."""
    size = _number_of("WORLD_SIZE", os.environ)
    if size > 1:
        raise UsageError(
            f"{program} runs in one process, but {size} were started (WORLD_SIZE): start it "
            "without torchrun. For several learners that train together: torchrun "
            "--nproc_per_node=2 -m torchbeast.polybeast_learner"
        )


def allow_descriptors(most: int | None = None) -> None:
    """Raises this process's limit of open files and connections to the user's maximum.

    most: the highest limit to set; None: the highest possible, or 10,240 if that is unlimited,
    because macOS does not grant more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    wanted = (most or _WHERE_NO_LIMIT_IS) if hard == endless else min(hard, most or hard)
    if soft != endless and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def limit_kept() -> Iterator[None]:
    """Restores this process's limit at the end, if the user still may."""
    before, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def allowed_descriptors() -> int:
    """Returns the number of files and connections that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft


class _Reserve:
    """Files that are open only to keep their places. Any thread may use it."""

    def __init__(self) -> None:
        self.wanted = 0
        self._open: list[int] = []

    def fill(self) -> None:
        """Opens as many files as are wanted, or as many as it can."""
        with suppress(OSError):
            while len(self._open) < self.wanted:
                self._open.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> None:
        """Closes all files."""
        with suppress(IndexError):
            while True:
                os.close(self._open.pop())


_RESERVE = _Reserve()
_FILES = 4  # in reserve for each run


@contextmanager
def keeping_reserve() -> Iterator[None]:
    """Keeps files in reserve during the body, a run, for the bodies of `reserved_files`."""
    _RESERVE.wanted += _FILES
    _RESERVE.fill()
    try:
        yield
    finally:
        _RESERVE.wanted -= _FILES
        _RESERVE.release()
        _RESERVE.fill()


@contextmanager
def reserved_files() -> Iterator[None]:
    """Gives the body, such as writing a checkpoint, the files in reserve: connections of strangers
    may have taken all others.
    """
    _RESERVE.release()
    try:
        yield
    finally:
        _RESERVE.fill()


def can_open_files() -> bool:
    """Returns whether this process may open another file or connection now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


_NOT_IN_FORKS: weakref.WeakSet[IO[bytes] | socket.socket] = weakref.WeakSet()


def close_in_forks(file: IO[bytes] | socket.socket) -> None:
    """Makes forks of this process give up the file: they would hold its lock, its pipe or its port
    until they end.
    """
    _NOT_IN_FORKS.add(file)


def _give_up_files() -> None:
    """Runs in a fork. Leads to nothing, because closing could wait for a lock of another thread, or
    write what its buffer has.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for file in tuple(_NOT_IN_FORKS):
        with suppress(ValueError, OSError):  # it is closed
            os.dup2(nothing, file.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_give_up_files)


def leave_lost_terminal(pipes: bool = False) -> None:
    """Discards output to a terminal that is gone, so that printing does not fail.

    It does not use locks, so that signal handlers can call it.

    pipes: also discard output to a pipe that nobody reads any more.
    """
    lost = [stream for stream in _STREAMS if is_lost(stream, pipes)]
    if not lost:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in lost:
        os.dup2(nothing, stream)
    os.close(nothing)


def show_cursor() -> None:
    """Shows the terminal's cursor again, which a live display has hidden.

    Signal handlers may call it: it takes no locks, and does not wait for the terminal.
    """
    with suppress(OSError):
        if os.isatty(1) and select.select([], [1], [], 0)[1]:
            os.write(1, b"\x1b[?25h")


def is_lost(stream: int, pipes: bool) -> bool:
    """Returns whether a stream leads to a terminal (pipes: or to a reader) that is gone."""
    poll = select.poll()
    poll.register(stream, 0)  # only reports that the other end is gone
    gone = any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))
    return gone and (pipes or stat.S_ISCHR(os.fstat(stream).st_mode))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the end of a short body in the main thread, which a Learner's user may
    interrupt. A second Ctrl-C interrupts the body, too. Bodies may be nested.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(handler) or isinstance(handler, _Delay):
        yield
        return
    delay = _Delay(handler)
    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(delay.came) == 1:
            handler(*delay.came[0])


class _Delay:
    """Keeps the first signal for later, and handles the second."""

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self._handler = handler
        self.came: list[tuple[int, Any]] = []

    def __call__(self, number: int, frame: Any) -> None:
        self.came.append((number, frame))
        if len(self.came) > 1:
            self._handler(number, frame)


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that this process may still use; None if unknown.

    root: folder of the system's files.
    """
    return min([*_of_the_machine(root), *_of_control_groups(root)], default=None)


def check_memory(size: int, each: int, buffers: int, free: int | None) -> None:
    """Raises UsageError if a replay of `size` steps of `each` bytes does not fit into memory
    together with the other buffers.
    """
    if free is None or size * each + buffers <= _MOST * free:
        return
    most = max(0, int(_MOST * free) - buffers) // each
    raise UsageError(
        f"replay_size {size} needs {in_bytes(size * each)} of memory, {each:,} bytes a step, and "
        f"{in_bytes(buffers)} for other buffers, but {in_bytes(free)} are free on this machine: "
        f"use at most replay_size {most}"
    )


def check_buffers(buffers: int, free: int | None) -> None:
    """Raises UsageError if the rollout buffers of a source do not fit into memory."""
    if free is not None and buffers > free:
        raise UsageError(
            f"the rollout buffers need {in_bytes(buffers)} of memory, but {in_bytes(free)} are "
            "free on this machine: use a smaller batch_size, a smaller unroll_length or fewer "
            "num_envs"
        )


def in_bytes(count: float) -> str:
    """Formats a number of bytes as "7.1 GB", or as "2.3 MB" if it is small."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _of_the_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])
            return
    if "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all memory, free or not
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_control_groups(root: Path) -> Iterator[int]:
    """Yields the bytes left in each control group that limits this process."""
    for group in _groups(root, "memory"):
        for limit, use, prefix in _OF_MEMORY:
            most, used = _number(group / limit), _number(group / use)
            if most is not None and used is not None:
                stat = dict(line.split() for line in _lines(group / "memory.stat"))
                files = (f"{prefix}inactive_file", f"{prefix}active_file")
                yield max(0, most - used + sum(int(stat.get(name, 0)) for name in files))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the control groups of this process, and of all groups above them.

    Those of version 1 have a folder per controller. In a container that may be the group's own.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        of_version_1 = (controller,) if controller in controllers.split(",") else ()
        for folder in of_version_1 if controllers else ("", "unified"):
            base = root / "sys/fs/cgroup" / folder
            group = base / path.strip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(base))


def _number(path: Path) -> int | None:
    """Reads a number; None if the file does not exist or has no limit ("max")."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    return _content(str(path)).decode().splitlines()


def keep_freed_memory(device: str = "cpu") -> None:
    """From now on, lets all threads of this process keep freed memory instead of returning it to
    the system. Does nothing without glibc, or if the user tunes malloc with one of _TUNED_BY.

    Networks on the CPU allocate and free megabytes for every operation. By default glibc returns
    such blocks to the system and gets new ones, with a page fault for each page, which took 10 %
    of the time of an update. The price is that heaps never shrink. Threads other than the main
    thread have heaps of 64 MiB; all but the first heap of a thread are still returned when empty.

    It cannot be undone, so only our own processes may call it. device: type of the device on which
    the process computes; nothing is done for a GPU.
    """
    if device != "cpu":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _TUNED_BY):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
