# SPDX-License-Identifier: Apache-2.0
"""Memory of a replay: a ring of chunks of T rows, the oldest of which is overwritten.

    chunk       12   13   14    9   10   11        numbered as written, never reused
    index        0    1    2    3    4    5        in memory: c % 6 for chunk c

The rows of chunk c are numbered from c * T on. The memory of row n is *ring row* n % (6 * T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from torchbeast.core.envs.spaces import ArraySpec

Allocate = Callable[[tuple[int, ...], str], np.ndarray]  # shape, dtype -> array of any contents


class ChunkRing:
    """Arrays [num_chunks * T, *shape], one for each leaf of a row.

    leaves: the arrays. written: the number of the next chunk.
    """

    def __init__(
        self, specs: Sequence[ArraySpec], unroll_length: int, num_chunks: int, allocate: Allocate
    ) -> None:
        """Reserves the memory of all chunks. specs: the leaves of a row."""
        self.unroll_length = unroll_length
        self.num_chunks = num_chunks
        rows = num_chunks * unroll_length
        self.leaves = [allocate((rows, *spec.shape), spec.dtype) for spec in specs]
        self.written = 0

    @property
    def oldest(self) -> int:
        """The number of the oldest chunk whose memory is not overwritten."""
        return max(0, self.written - self.num_chunks)

    def index(self, chunk: int) -> int:
        """Returns the chunk's place among those in memory."""
        return chunk % self.num_chunks

    def rows(self, chunk: int) -> slice:
        """Returns the ring rows of a chunk."""
        start = self.index(chunk) * self.unroll_length
        return slice(start, start + self.unroll_length)


def row_bytes(specs: Sequence[ArraySpec]) -> int:
    """Returns the bytes of one array for each spec."""
    return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs)
