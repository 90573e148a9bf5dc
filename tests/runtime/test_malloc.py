# SPDX-License-Identifier: Apache-2.0
"""Memory that is freed and asked for again costs no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchbeast.runtime.malloc import keep_freed_memory

# Megabytes that are held at a time, in the order in which a network allocates them: the heap's free
# end grows beyond what glibc keeps; and a block larger than any that it takes from a heap.
ACTIVATIONS, LARGE = [2.4, 9.5, 4.3, 2.2, 1.0, 4.3, 9.5], [40]
# Faults of the last rounds count: glibc takes some to find out what is needed.
PROGRAM = """
import json, resource, sys, threading
import numpy as np
from torchbeast.runtime.malloc import keep_freed_memory

def use(sizes):
    for _ in range(20):
        blocks = [np.full(int(size * 1e6), 1, np.uint8) for size in sizes]

def measure(sizes):
    use(sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(sizes)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "keep":
    assert keep_freed_memory()
where, sizes = sys.argv[2], json.loads(sys.argv[3])
if where == "thread":
    thread = threading.Thread(target=measure, args=(sizes,))
    thread.start()
    thread.join()
else:
    measure(sizes)
"""

pytestmark = pytest.mark.skipif(not keep_freed_memory(), reason="this C library has no mallopt")


def faults(how: str, where: str, sizes: list[float]) -> int:
    command = [sys.executable, "-c", PROGRAM, how, where, str(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("where", "sizes"), [("main", ACTIVATIONS), ("thread", ACTIVATIONS), ("main", LARGE)]
)
def test_blocks_are_used_again_without_faults(where: str, sizes: list[float]) -> None:
    assert faults("keep", where, sizes) < 1000
