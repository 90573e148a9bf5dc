# SPDX-License-Identifier: Apache-2.0
"""Tracks: the rows of one environment that follow each other without a gap.

The rollouts of an environment overlap in one row, so a track stores row 0 of its first rollout and
rows 1..T of all:

    rollouts    0 1 2 3 4                      T = 4
                        0 1 2 3 4
                                0 1 2 3 4
    chunks      . . . 0 | 1 2 3 4 | 1 2 3 4 | 1 2 3 4
    positions         3   4 ... 7   8 .. 11   12 ...

Row 0 is the last of a chunk of its own. A *position* is therefore T times the number of the chunk
within the track, plus the row within the chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from torchbeast.core.storages.chunk_ring import ChunkRing


class Finished(NamedTuple):
    """An episode whose end is known."""

    position: int  # of its first row
    length: int  # in steps


@dataclass(slots=True, eq=False)
class Track:
    """Rows of one environment of one agent, of which the oldest may be overwritten."""

    agent: int
    env_index: int
    rollout: int  # rollout_index of the newest rollout
    unroll_length: int
    overwritten: int = 0  # number of chunks that were overwritten, or never stored
    chunks: deque[int] = field(default_factory=deque)  # numbers of the others, oldest first
    episode: int | None = None  # position of the running episode's first row; None: not seen
    waiting: list[Finished] = field(default_factory=list)  # their first T + 1 rows are not all here

    @property
    def start(self) -> int:
        """The position of the oldest stored row."""
        return self.overwritten * self.unroll_length

    @property
    def end(self) -> int:
        """The position of the next row."""
        return (self.overwritten + len(self.chunks)) * self.unroll_length

    def row(self, position: int) -> int:
        """Returns the number of the stored row at a position."""
        nth, place = divmod(position, self.unroll_length)
        return self.chunks[nth - self.overwritten] * self.unroll_length + place

    def ring_rows(self, positions: np.ndarray, ring: ChunkRing) -> np.ndarray:
        """Returns the ring rows of stored positions, both int64 of the same shape."""
        nth, places = np.divmod(positions, self.unroll_length)
        first, last = int(nth.min()), int(nth.max())
        stored = range(first - self.overwritten, last - self.overwritten + 1)
        indices = np.array([ring.index(self.chunks[n]) for n in stored])
        rows: np.ndarray = indices[nth - first] * self.unroll_length + places
        return rows

    def note_ends(self, done: np.ndarray) -> None:
        """Notes the episodes that begin and end in the newest chunk; done: bool [T]."""
        before = self.end - self.unroll_length
        for position in (before + np.flatnonzero(done)).tolist():
            if self.episode is not None:
                self.waiting.append(Finished(self.episode, position - self.episode))
            self.episode = position

    def take_ready(self) -> list[Finished]:
        """Removes and returns the waiting episodes of which T + 1 rows are stored from the first
        on. Those whose first row was overwritten meanwhile are forgotten.
        """
        last = self.end - 1 - self.unroll_length
        ready = [episode for episode in self.waiting if episode.position <= last]
        self.waiting = [episode for episode in self.waiting if episode.position > last]
        return [episode for episode in ready if episode.position >= self.start]
