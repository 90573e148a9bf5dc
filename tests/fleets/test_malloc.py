# SPDX-License-Identifier: Apache-2.0
"""Freed memory is reused without page faults."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

# Megabytes that are held at a time; the last block is larger than any that glibc takes from a heap.
# Faults of the last rounds count: it takes some to find out what is needed.
PROGRAM = """
import json, resource, threading
from torchbeast.fleets.system import keep_freed_memory

found = {}

def use(rounds):
    for _ in range(rounds):
        sizes = (2.4, 9.5, 4.3, 40)
        blocks = [bytearray(int(size * 1e6)) for size in sizes]
        del blocks

def measure(where):
    use(8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(4)
    found[where] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
measure("main")
thread = threading.Thread(target=measure, args=("thread",))
thread.start()
thread.join()
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not glibc"
)


def faults(**tuned: str) -> dict[str, int]:
    """Runs a program; returns the page faults of its main thread and of another."""
    command, environment = [sys.executable, "-c", PROGRAM], os.environ | tuned
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_freed_blocks_are_reused_without_page_faults_unless_the_user_has_settings() -> None:
    kept, users = faults(), faults(MALLOC_TRIM_THRESHOLD_="1000000")
    assert min(users.values()) > 10_000
    assert all(5 * kept[where] < users[where] for where in users), (kept, users)
