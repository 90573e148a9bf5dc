# SPDX-License-Identifier: Apache-2.0
"""Keeps the C library from giving freed memory back to the system between two uses.

Networks on the CPU allocate and free megabytes for every operation. By default glibc returns such
blocks, and the system hands out others, with a fault for each page: a tenth of the time to learn
from a batch went into that. What a process keeps is what it once needed at a time, and gaps.
"""

from __future__ import annotations

import ctypes
import sys

# Of <malloc.h>: how many blocks are asked of the system one by one, and how large the free end of
# a heap is when it is given back.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """From now on, in this process and all its threads; whether the C library can do so."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
