# SPDX-License-Identifier: Apache-2.0
"""Makes the C library keep freed memory instead of returning it to the system.

Networks on the CPU allocate and free megabytes for every operation. By default glibc returns such
blocks to the system and gets new ones, with a page fault for each page, which took a tenth of the
time of an update. The price is that no heap ever shrinks. Threads other than the main one have
heaps of 64 MiB; all but a thread's first are still returned when empty.

Nothing is changed when the user already tunes malloc with one of _TUNED_BY.
"""

from __future__ import annotations

import ctypes
import os

_TUNED_BY = ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")
# From <malloc.h>: the number of blocks that may be allocated by mmap, and the size of a heap's free
# end at which it is returned to the system.
_M_MMAP_MAX, _M_TRIM_THRESHOLD = -4, -1
_NEVER = -1


def keep_freed_memory(device: str = "cpu") -> None:
    """Applies to all threads of this process from now on. A no-op without glibc.

    It cannot be undone, so it is for processes of our own only. device: the type of
    the device that the process computes on; a no-op for a GPU.
    """
    if device != "cpu":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _TUNED_BY):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
