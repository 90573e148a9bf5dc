# SPDX-License-Identifier: Apache-2.0
"""The memory of a replay: a ring of chunks of T rows, the oldest of which is overwritten.

    chunk       12   13   14    9   10   11        numbered as written, never reused
    index        0    1    2    3    4    5        in memory: c % 6 for chunk c

The rows of chunk c are numbered from c * T on. The memory of row n is *ring row* n % (6 * T).

A *trajectory* is the rows of one environment that follow each other without a gap. The rollouts of
an environment overlap in one row, so a trajectory stores row 0 of its first rollout and rows 1..T
of all:

    rollouts    0 1 2 3 4                      T = 4
                        0 1 2 3 4
                                0 1 2 3 4
    chunks      . . . 0 | 1 2 3 4 | 1 2 3 4 | 1 2 3 4
    positions         3   4 ... 7   8 .. 11   12 ...

Row 0 is the last of a separate chunk. A *position* is therefore T times the number of the chunk
within the trajectory, plus the row within the chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.envs.contract import is_reset
from torchbeast.core.storages.replay.file import ReplayReader, ReplayWriter


@dataclass(slots=True, eq=False)
class Trajectory:
    """Rows of one environment of one agent, of which the oldest may be overwritten."""

    agent: int
    env_index: int
    rollout: int  # rollout_index of the newest rollout
    unroll_length: int
    overwritten: int = 0  # number of chunks that were overwritten, or never stored
    chunks: deque[int] = field(default_factory=deque)  # numbers of the others, oldest first
    episode: int | None = None  # position of the running episode's first row; None: not seen
    # Finished episodes whose first T + 1 rows are not all here: position of the first row, steps.
    waiting: list[tuple[int, int]] = field(default_factory=list)

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

    def note_ends(self, done: np.ndarray, resets: np.ndarray) -> list[tuple[int, int]]:
        """Notes the episodes that begin and end in the newest chunk; done, resets: bool [T].

        Returns the finished episodes of which T + 1 rows are now stored from the first row on, as
        position of that row and number of steps. Episodes whose first row was overwritten
        meanwhile are forgotten.
        """
        first = self.end - self.unroll_length
        for place in np.flatnonzero(done).tolist():
            position = first + place
            if self.episode is not None and not resets[place]:
                self.waiting.append((self.episode, position - self.episode))
            self.episode = position
        last = self.end - 1 - self.unroll_length
        ready = [episode for episode in self.waiting if self.start <= episode[0] <= last]
        self.waiting = [episode for episode in self.waiting if episode[0] > last]
        return ready


class EpisodeList:
    """The episodes that can be sampled, each named by the number of its first row.

    rows: these numbers in an order on which the draws depend; the last one fills the gap of one
        that is removed.

    Every method but `reorder` takes constant time.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._found: dict[int, tuple[int, int]] = {}  # place in `rows`, number of steps

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, row: int) -> bool:
        return row in self._found

    def length(self, row: int) -> int:
        """Returns the number of steps of a listed episode."""
        return self._found[row][1]

    def add(self, row: int, length: int) -> None:
        """Lists an episode that is not listed."""
        self._found[row] = len(self.rows), length
        self.rows.append(row)

    def discard(self, row: int) -> None:
        """Removes an episode if it is listed."""
        if row in self._found:
            place, _ = self._found.pop(row)
            last = self.rows.pop()
            if last != row:
                self.rows[place] = last
                self._found[last] = place, self.length(last)

    def draw(self, generator: np.random.Generator) -> int:
        """Returns the first row of an episode, each with the same probability."""
        return self.rows[generator.integers(len(self.rows))]

    def reorder(self, rows: list[int]) -> None:
        """Lists the same episodes in this order; ValueError when they are not the same."""
        require(sorted(rows) == sorted(self.rows), "its episodes are not those of its rows")
        self.rows = rows
        self._found = {row: (place, self.length(row)) for place, row in enumerate(rows)}


class TrajectoryRing:
    """A ring of chunks, their trajectories, and the episodes that can be sampled. A chunk is added
    in two steps:

        rows = ring.extend(trajectory)    overwrites the oldest chunk if the ring is full
        ...                               the caller fills these ring rows
        ring.finish(trajectory, finals)   lists the episodes that have become complete

    fields: arrays [num_rows, *shape], a nest for each field of a row except the observation.
    others: the same arrays as a list. frames: the observation's leaves. leaves: all of these.
    episodes: the list.

    K is the number of truncations in a chunk. A truncation in row 0 of a trajectory does not count:
    its final observation was in a rollout before.
    """

    def __init__(self, rows: Mapping[str, Any], unroll_length: int, num_chunks: int) -> None:
        """Reserves the memory of all chunks. rows: a nest of ArraySpec for each field of a row."""
        self.unroll_length, self.num_chunks = unroll_length, num_chunks
        self.num_rows = num_chunks * unroll_length
        self.fields: dict[str, Any] = map_leaves(
            lambda spec: np.empty((self.num_rows, *spec.shape), spec.dtype), dict(rows)
        )
        self.frames: list[np.ndarray] = flatten(self.fields.pop("observation"))
        self.others: list[np.ndarray] = flatten(self.fields)
        self.leaves = [*self.others, *self.frames]
        self.clear(0)

    def clear(self, first_chunk: int) -> None:
        """Forgets everything; chunks are numbered from first_chunk on."""
        self.episodes = EpisodeList()
        self._first = self._written = first_chunk  # of the next chunk
        self._trajectories: list[Trajectory | None] = [None] * self.num_chunks  # by index
        # By index: the chunk's number within its trajectory.
        self._nth = np.zeros(self.num_chunks, np.int64)
        # By index: the number of the chunk before and after it in its trajectory; -1: there is
        # none.
        self._before = np.full(self.num_chunks, -1, np.int64)
        self._after = np.full(self.num_chunks, -1, np.int64)
        self._finals: dict[int, list[np.ndarray]] = {}  # by chunk: leaves [K, C, ...], by row
        self._row_0s = 0  # number of chunks with the row 0 of a trajectory only

    @property
    def chunks(self) -> range:
        """The numbers of the stored chunks, oldest first."""
        return range(max(self._first, self._written - self.num_chunks), self._written)

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return (len(self.chunks) - self._row_0s) * self.unroll_length

    @property
    def rows(self) -> range:
        """The numbers of the rows of all stored chunks, oldest first."""
        return range(self.chunks.start * self.unroll_length, self.chunks.stop * self.unroll_length)

    def ring_rows(self, chunk: int) -> slice:
        """Returns the ring rows of a chunk."""
        start = chunk % self.num_chunks * self.unroll_length
        return slice(start, start + self.unroll_length)

    def ring_rows_at(self, trajectory: Trajectory, positions: np.ndarray) -> np.ndarray:
        """Returns the ring rows at stored positions of a trajectory; both int64 of one shape."""
        nth, places = np.divmod(positions, self.unroll_length)
        first, last = int(nth.min()), int(nth.max())
        stored = range(first - trajectory.overwritten, last - trajectory.overwritten + 1)
        starts = [trajectory.chunks[n] % self.num_chunks * self.unroll_length for n in stored]
        return np.array(starts)[nth - first] + places

    def trajectories(self, others: Iterable[Trajectory]) -> list[Trajectory]:
        """Returns every trajectory that has stored chunks, and others."""
        trajectories = [*(self._trajectory(chunk) for chunk in self.chunks), *others]
        return list({id(trajectory): trajectory for trajectory in trajectories}.values())

    def _trajectory(self, chunk: int) -> Trajectory:
        trajectory = self._trajectories[chunk % self.num_chunks]
        assert trajectory is not None
        return trajectory

    def locate(self, row: int) -> tuple[Trajectory, int]:
        """Returns the trajectory of a stored row, and its position there."""
        chunk, place = divmod(row, self.unroll_length)
        nth = int(self._nth[chunk % self.num_chunks])
        return self._trajectory(chunk), nth * self.unroll_length + place

    def rows_beside(self, rows: np.ndarray, step: int) -> np.ndarray:
        """Returns the numbers of the rows before (step -1) or after (1) these in their
        trajectories, -1 where it is not stored; int64 [N] both.
        """
        length = self.unroll_length
        chunks, places = rows // length, rows % length + step
        others = (self._before if step < 0 else self._after)[chunks % self.num_chunks]
        return np.where(
            (places >= 0) & (places < length),
            rows + step,
            np.where(others < self.chunks.start, -1, others * length + places % length),
        )

    def rows_ahead(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns the numbers of the rows that many steps after these in their trajectories, which
        must be stored; int64 [N] all.
        """
        chunks, places = np.divmod(rows, self.unroll_length)
        places = places + steps
        while (beyond := places >= self.unroll_length).any():
            chunks = np.where(beyond, self._after[chunks % self.num_chunks], chunks)
            places = np.where(beyond, places - self.unroll_length, places)
        return chunks * self.unroll_length + places

    def begin_trajectories(self, rows: np.ndarray) -> np.ndarray:
        """Returns which of these stored rows are in a chunk that holds the row 0 of a trajectory
        only; bool [N].
        """
        return self._nth[rows // self.unroll_length % self.num_chunks] == 0

    def final(self, row: int) -> list[np.ndarray]:
        """Returns the newest frames [C, ...] of the final observation of a truncated row."""
        chunk, place = divmod(row, self.unroll_length)
        index = int(self.fields["truncated"][self.ring_rows(chunk)][:place].sum())
        return [leaf[index] for leaf in self._finals[chunk]]

    def extend(self, trajectory: Trajectory) -> slice:
        """Gives the next chunk to a trajectory and returns its ring rows."""
        chunk = self._written
        if len(self.chunks) == self.num_chunks:
            self._forget(self.chunks[0])
        index = chunk % self.num_chunks
        self._trajectories[index] = trajectory
        self._nth[index] = trajectory.overwritten + len(trajectory.chunks)
        self._row_0s += int(self._nth[index] == 0)
        self._before[index], self._after[index] = -1, -1
        if trajectory.chunks:
            self._before[index] = trajectory.chunks[-1]
            self._after[trajectory.chunks[-1] % self.num_chunks] = chunk
        trajectory.chunks.append(chunk)
        self._written += 1
        return self.ring_rows(chunk)

    def finish(self, trajectory: Trajectory, finals: list[np.ndarray]) -> None:
        """Takes note of what a trajectory's newest chunk contains.

        finals: leaves [K, C, ...], newest frames of the final observations, by row; [] if K is 0.
        """
        chunk = trajectory.chunks[-1]
        if finals:
            self._finals[chunk] = finals
        rows = self.ring_rows(chunk)
        done, steps = (self.fields[name][rows] for name in ("done", "episode_step"))
        for position, length in trajectory.note_ends(done, is_reset(done, steps)):
            self.episodes.add(trajectory.row(position), length)

    def _forget(self, chunk: int) -> None:
        """Forgets the oldest chunk and the episodes that begin in it."""
        for place in np.flatnonzero(self.fields["done"][self.ring_rows(chunk)]).tolist():
            self.episodes.discard(chunk * self.unroll_length + place)
        trajectory = self._trajectory(chunk)
        trajectory.chunks.popleft()
        trajectory.overwritten += 1
        self._row_0s -= int(self._nth[chunk % self.num_chunks] == 0)
        self._finals.pop(chunk, None)

    # --- files

    def write(self, writer: ReplayWriter, trajectories: Sequence[Trajectory]) -> None:
        """Writes every chunk with the number of its trajectory among `trajectories`."""
        numbers = {id(trajectory): number for number, trajectory in enumerate(trajectories)}
        for chunk in self.chunks:
            writer.array(np.array(numbers[id(self._trajectory(chunk))], np.int64))
            for leaf in self.leaves:
                writer.array(leaf[self.ring_rows(chunk)])
            for final in self._finals.get(chunk, ()):
                writer.array(final)

    def read(self, reader: ReplayReader, trajectories: Sequence[Trajectory], count: int) -> None:
        """Reads that many chunks and adds them to the trajectories, as if they were inserted."""
        for _ in range(count):
            number = int(reader.array((), "int64"))
            total = len(trajectories)
            require(0 <= number < total, f"there is no trajectory {number} of {total}")
            rows = self.extend(trajectories[number])
            for leaf in self.leaves:
                reader.into(leaf[rows])
            self.finish(trajectories[number], self._read_finals(reader, rows))

    def _read_finals(self, reader: ReplayReader, rows: slice) -> list[np.ndarray]:
        done, truncated = (self.fields[name][rows] for name in ("done", "truncated"))
        if self._nth[rows.start // self.unroll_length] == 0:  # only the last row is one
            done[:-1] = truncated[:-1] = False
            return []
        if not (count := int(truncated.sum())):
            return []
        return [reader.array((count, *leaf.shape[1:]), str(leaf.dtype)) for leaf in self.frames]
