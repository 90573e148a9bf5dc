# SPDX-License-Identifier: Apache-2.0
"""CPU times of other processes are right, and unknown ones are NaN."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import sample
from bench.sample import cpu_seconds, family

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('here', flush=True); input()"],
                         stdin=subprocess.PIPE, start_new_session=True)
input()
child.communicate(b"")
"""


@linux
def test_the_cpu_time_is_that_which_the_process_itself_counts() -> None:
    while time.process_time() < 0.2:
        continue
    before = time.process_time()
    told = cpu_seconds([os.getpid()])
    assert before - 0.05 <= told <= time.process_time() + 0.05


@linux
def test_grandchildren_belong_to_the_family() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        found = family(process.pid)
        process.communicate(b"\n")
    assert found[0] == process.pid and len(found) == 2
    assert os.getpid() not in found


def test_the_cpu_time_of_a_process_that_is_gone_is_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert math.isnan(cpu_seconds([process.pid]))


def test_without_proc_cpu_times_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sample, "_PROC", tmp_path)
    assert math.isnan(cpu_seconds([os.getpid()]))
    assert family(os.getpid()) == [os.getpid()]
