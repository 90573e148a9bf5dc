# SPDX-License-Identifier: Apache-2.0
"""The episodes that a replay can sample, from which one is drawn uniformly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.storages.chunk_ring import Allocate

BYTES_PER_ROW = 16  # at most: where every row is an episode's first


class EpisodeList:
    """A set of episodes, each named by the number of its first row.

        place   [rows]   at the first row of an episode: its entry in the list
        first   [rows]   entry -> first row         }  the first len(self) entries count; the last
        length  [rows]   entry -> number of steps   }  fills the gap of one that is removed

    Every method takes constant time. `place` is never initialised: it counts where `first` agrees.
    """

    def __init__(self, rows: int, allocate: Allocate) -> None:
        """Makes an empty list; rows: how many a replay stores, numbered modulo this."""
        self._rows = rows
        self._place = allocate((rows,), "int32")
        self._first = allocate((rows,), "int64")
        self._length = allocate((rows,), "int32")
        self._count = 0

    def clear(self) -> None:
        """Empties the list."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: int) -> bool:
        place = self._place[row % self._rows]
        return bool(0 <= place < self._count and self._first[place] == row)

    def length(self, row: int) -> int:
        """Returns the number of steps of a listed episode."""
        return int(self._length[self._place[row % self._rows]])

    def add(self, row: int, length: int) -> None:
        """Lists an episode that is not listed."""
        self._put(self._count, row, length)
        self._count += 1

    def discard(self, row: int) -> None:
        """Removes an episode if it is listed."""
        if row in self:
            last = self._count - 1
            place = int(self._place[row % self._rows])
            self._put(place, int(self._first[last]), int(self._length[last]))
            self._count = last

    def draw(self, generator: np.random.Generator) -> int:
        """Returns the first row of an episode, each with the same probability."""
        return int(self._first[generator.integers(self._count)])

    @property
    def rows(self) -> np.ndarray:
        """First rows int64 [len(self)] in the order of the list, on which the draws depend."""
        return self._first[: self._count]

    def reorder(self, rows: Sequence[int]) -> None:
        """Lists the same episodes in this order; ValueError when they are not the same."""
        require(
            sorted(rows) == sorted(self.rows.tolist()), "its episodes are not those of its rows"
        )
        lengths = [self.length(row) for row in rows]
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self._put(place, row, length)

    def _put(self, place: int, row: int, length: int) -> None:
        self._first[place], self._length[place] = row, length
        self._place[row % self._rows] = place
