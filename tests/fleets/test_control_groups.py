# SPDX-License-Identifier: Apache-2.0
"""Free memory and cores: what the machine has, or the least that a control group above leaves; and
who uses the cores.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from torchbeast.fleets.system import CoreTime, available_cores, core_time, free_memory

GB = 10**9


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A system's files: 20 GB are available, and no control group limits anything."""
    write(tmp_path / "proc/meminfo", "MemTotal: 24684100 kB\nMemAvailable:   20000000 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def of_version_2(group: Path, most: str, used: int, cached: int = 0) -> None:
    write(group / "memory.max", f"{most}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {cached}\nactive_file {cached}\n")


def test_this_machine_has_some() -> None:
    free = free_memory()
    assert free is not None and free > 10**7


def test_without_control_groups_it_is_what_the_machine_has(machine: Path) -> None:
    assert free_memory(machine) == 20_000_000 * 1024


def test_a_group_leaves_its_limit_less_what_it_uses_and_cannot_drop(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step\n")
    of_version_2(machine / "sys/fs/cgroup/job/step", str(8 * GB), 3 * GB, cached=GB)
    assert free_memory(machine) == 7 * GB


def test_the_limit_of_a_group_above_holds_too(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step\n")
    of_version_2(machine / "sys/fs/cgroup/job", str(4 * GB), 3 * GB)
    of_version_2(machine / "sys/fs/cgroup/job/step", str(8 * GB), 3 * GB)
    assert free_memory(machine) == GB


def test_a_group_without_a_limit_takes_nothing_away(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/\n")
    of_version_2(machine / "sys/fs/cgroup", "max", 3 * GB)
    assert free_memory(machine) == 20_000_000 * 1024


@pytest.mark.parametrize("folder", ["job", "."])  # in a container the path is the host's
def test_groups_of_version_1_limit_it(machine: Path, folder: str) -> None:
    write(machine / "proc/self/cgroup", "5:cpu,cpuacct:/\n4:hugetlb,memory:/job\n1:name=a:b:/\n")
    group = machine / "sys/fs/cgroup/memory" / folder
    write(group / "memory.limit_in_bytes", f"{8 * GB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GB}\n")
    write(group / "memory.stat", f"cache 5\ntotal_inactive_file {GB}\ntotal_active_file 0\n")
    assert free_memory(machine) == 6 * GB


def test_more_is_used_than_the_limit_allows_for_a_moment(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/\n")
    of_version_2(machine / "sys/fs/cgroup", str(GB), 2 * GB)
    assert free_memory(machine) == 0


@pytest.fixture
def eight_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same system, with eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    write(machine / "proc/self/cgroup", "3:cpu,cpuacct:/job/step\n0::/job/step\n")
    return machine


@pytest.mark.parametrize(
    ("version", "group", "quota", "cores"),
    [
        *[(2, "job/step", *case) for case in ((50_000, 1), (200_000, 2), (10_000_000, 8))],
        *[(version, "job", *case) for version in (1, 2) for case in ((250_000, 3), (None, 8))],
        (2, ".", 200_000, 2),
        (1, ".", 200_000, 2),
    ],
)
def test_a_quota_of_processor_time_limits_the_cores_and_a_part_of_a_core_is_one(
    eight_cores: Path, version: int, group: str, quota: int | None, cores: int
) -> None:
    if version == 1:
        folder = eight_cores / "sys/fs/cgroup/cpu" / group
        write(folder / "cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
        write(folder / "cpu.cfs_period_us", "100000\n")
    else:
        most = "max" if quota is None else quota
        write(eight_cores / "sys/fs/cgroup" / group / "cpu.max", f"{most} 100000\n")
    assert available_cores(eight_cores) == cores


def test_learners_on_one_machine_share_the_quota(
    eight_cores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(eight_cores / "sys/fs/cgroup/job/cpu.max", "400000 100000\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert available_cores(eight_cores) == 2


# --- the use of cores


def runs(proc: Path, pid: int, parent: int, *ticks: int, delays: tuple[int, ...] = ()) -> None:
    """Writes the files of a process; ticks: user, system, and those of children that have ended.
    delays: of its threads, in nanoseconds.
    """
    times = " ".join(map(str, ticks))
    stat = f"{pid} (a) R 1\n\x99(b) S {parent} 3 4 5 6 7 8 9 10 11 {times} 9\n"  # its name is odd
    write(proc / str(pid) / "stat", "")
    (proc / str(pid) / "stat").write_bytes(stat.encode("latin-1"))
    for thread, delay in enumerate(delays):
        write(proc / str(pid) / f"task/{pid + thread}/schedstat", f"77 {delay} 5\n")


@pytest.fixture
def busy(eight_cores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same system, where this process may use cores 0 and 1, and has a child and a grandchild;
    process 5 belongs to somebody else.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "getpid", lambda: 20)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    runs(eight_cores / "proc", 5, 1, 90000, 90000, 0, 0, delays=(10**12,))
    runs(eight_cores / "proc", 20, 1, 100, 50, 7, 3, delays=(10**12,))
    runs(eight_cores / "proc", 31, 20, 200, 0, 0, 0, delays=(2 * 10**9, 10**9))
    runs(eight_cores / "proc", 7, 31, 40, 0, 0, 0, delays=(5 * 10**8,))
    idle = "cpu1 0 0 100 5000 5000 0 0 0 0 0\ncpu2 9000 0 0 0 0 0 0 0 0 0\nintr 1\n"
    write(eight_cores / "proc/stat", f"cpu 7 7 7 7\ncpu0 100 20 30 8000 70 1 2 47 9 9\n{idle}")
    return eight_cores


def test_the_time_of_this_process_includes_its_descendants_and_nobody_else(busy: Path) -> None:
    write(busy / f"proc/20/task/{threading.get_native_id()}/schedstat", "77 250000000 5\n")
    found = core_time(busy)
    assert found.own == pytest.approx(4.0)
    assert found.delayed == pytest.approx(3.75)  # without its threads that are not Python's


def test_the_threads_of_a_process_that_ends_meanwhile_do_not_count(busy: Path) -> None:
    shutil.rmtree(busy / "proc/31/task")
    write(busy / "proc/31/task", "no folder")
    shutil.rmtree(busy / "proc/7/task/7")
    (busy / "proc/7/task/7").mkdir()
    assert core_time(busy).delayed == 0


def test_the_cores_that_this_process_may_use_are_in_use_when_they_neither_idle_nor_wait_for_a_disk(
    busy: Path,
) -> None:
    assert core_time(busy).used == pytest.approx((1.5,))


@pytest.mark.parametrize("version", [1, 2])
def test_the_use_of_a_quota_is_that_of_its_whole_group(busy: Path, version: int) -> None:
    """12 seconds of a quota of 2.5 cores."""
    if version == 1:
        group = busy / "sys/fs/cgroup/cpu/job"
        write(group / "cpu.cfs_quota_us", "250000\n")
        write(group / "cpu.cfs_period_us", "100000\n")
        write(group / "cpuacct.usage", "12000000000\n")
    else:
        group = busy / "sys/fs/cgroup/job"
        write(group / "cpu.max", "250000 100000\n")
        write(group / "cpu.stat", "usage_usec 12000000\nuser_usec 1\nnr_periods 2\n")
    assert core_time(busy).used == pytest.approx((1.5, 4.8))


def test_a_system_without_these_files_says_nothing(tmp_path: Path) -> None:
    assert str(core_time(tmp_path)) == str(CoreTime())


def test_this_machine_says_what_its_processes_use() -> None:
    before = core_time()
    assert sum(range(10**7))
    now = core_time()
    assert now.own > before.own and now.used[0] > before.used[0]
