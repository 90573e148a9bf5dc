# SPDX-License-Identifier: Apache-2.0
"""Keeps the C library from giving freed memory back to the system between two uses.

Networks on the CPU allocate and free megabytes for every operation. By default glibc returns such
blocks, and the system hands out others, with a fault for each page: a tenth of the time to learn
from a batch went into that. The price: each heap stays as large as it ever was. Threads other than
the main one have heaps of 64 MiB, and those after a thread's first are still returned when empty.

Whoever tunes malloc with one of _TUNED_BY is left alone.
"""

from __future__ import annotations

import ctypes
import os

_TUNED_BY = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
# Of <malloc.h>: how many blocks are asked of the system one by one, and how large the free end of
# a heap is when it is given back.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = -1


def keep_freed_memory() -> None:
    """From now on, in this process and all its threads. Without glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _TUNED_BY):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
