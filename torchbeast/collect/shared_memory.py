# SPDX-License-Identifier: Apache-2.0
"""Shared memory: nests of numpy arrays in an anonymous file.

The file does not have a name, so nothing is left behind when its processes end, for any reason. A
child process inherits or receives the descriptor and maps the same bytes. Where Python has
memfd_create, the file is sealed against resizing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, pack_as
from torchbeast.core.envs.spaces import num_bytes

_ALIGNMENT = 64  # bytes of a cache line, so that arrays do not share one


class SharedFile:
    """Memory shared by all processes that have the descriptor.

    bytes: the memory. descriptor: of the file.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Creates a file of `size` bytes, or maps the open file `descriptor`, which stays open."""
        self.descriptor = _anonymous(size) if descriptor is None else os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)  # arrays only keep the memory alive
        self.bytes = mmap.mmap(self.descriptor, size)


def slot_size(specs: Any) -> int:
    """Returns the bytes that a nest of ArraySpec occupies."""
    return sum(aligned(num_bytes(spec)) for spec in flatten(specs))


def arrays_at(specs: Any, memory: mmap.mmap, offset: int) -> Any:
    """Returns the nest of arrays at `offset`, as views of the memory."""
    arrays: list[np.ndarray] = []
    for spec in flatten(specs):
        arrays.append(np.ndarray(spec.shape, spec.dtype, memory, offset))
        offset += aligned(num_bytes(spec))
    return pack_as(specs, arrays)


def aligned(size: int) -> int:
    """Rounds a size up to the start of the next array."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _anonymous(size: int) -> int:
    """Returns the descriptor of a new anonymous file. Its pages take memory when written."""
    if hasattr(os, "memfd_create"):  # does not use /dev/shm, which is small in containers
        descriptor = os.memfd_create("torchbeast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return descriptor
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
