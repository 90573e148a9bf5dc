# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share: nests of numpy arrays in an anonymous file.

The file has no name, so nothing is left behind however its processes end. A child is given the
descriptor and maps the same bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import flatten, pack_as

_ALIGNMENT = 64  # a cache line: no two arrays share one


class SharedFile:
    """Bytes that are shared by all processes that hold the descriptor."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Makes a file of `size` bytes, or maps the one that `descriptor` is open on."""
        self.descriptor = _anonymous(size) if descriptor is None else descriptor
        if descriptor is None:  # arrays keep the memory, but nothing else would close this
            weakref.finalize(self, os.close, self.descriptor)
        self.bytes = mmap.mmap(self.descriptor, size)


def slot_size(specs: Any) -> int:
    """Bytes that a nest of ArraySpec takes."""
    return sum(aligned(_size(spec)) for spec in flatten(specs))


def arrays_at(specs: Any, memory: mmap.mmap, offset: int) -> Any:
    """The nest of arrays that lies at `offset`; whoever writes to them writes to the memory."""
    leaves: Sequence[ArraySpec] = flatten(specs)
    arrays = []
    for spec in leaves:
        count = math.prod(spec.shape)
        flat = np.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset)
        arrays.append(flat.reshape(spec.shape))
        offset += aligned(_size(spec))
    return pack_as(specs, arrays)


def _size(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def aligned(size: int) -> int:
    """The size up to where the next array may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _anonymous(size: int) -> int:
    """A descriptor of a new file without a name. Its pages take memory once they are written."""
    if hasattr(os, "memfd_create"):  # not bound by /dev/shm, which is small in containers
        descriptor = os.memfd_create("torchbeast")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
