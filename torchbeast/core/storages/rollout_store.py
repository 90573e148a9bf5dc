# SPDX-License-Identifier: Apache-2.0
"""Rollouts joined to tracks, in a ring: what the replays have in common.

    insert    columns [T+1, B] --> rows 1..T, newest frames only --> ring of chunks

First in, first out. Recurrent state is not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.nest_py import flatten, pack_as
from torchbeast.core.storages.chunk_ring import Allocate, ChunkRing
from torchbeast.core.storages.episodes import EpisodeList
from torchbeast.core.storages.frame_stacks import newest, stack_positions
from torchbeast.core.storages.replay_file import ReplayReader, ReplayWriter, integer
from torchbeast.core.storages.rollout_columns import RolloutColumn, columns_of
from torchbeast.core.storages.stored_rows import bytes_per_transition, described, row_specs
from torchbeast.core.storages.stored_tracks import StoredTracks
from torchbeast.core.storages.tracks import Track

Arrays = Mapping[str, Any]  # a field of Rollout -> its nest of arrays


_MANY_ENVIRONMENTS = 10_000  # more may have left the run


class Facts(NamedTuple):
    """Figures for logs."""

    fill: float  # share of the memory in use; at 1.0 every rollout overwrites the oldest
    samples_per_insert: float  # steps read per step inserted, since the beginning


class RolloutStore(ABC):
    """Rollouts joined to tracks, at most `capacity` transitions.

        store.insert(arrays, slice(0, 8), agent=0)

    `arrays` is a dict of numpy arrays [T+1, B, ...] by field of Rollout, which may be views of
    torch's memory.

    inserted, sampled: steps inserted and read so far.
    """

    def __init__(
        self,
        fields: Arrays,
        capacity: int,
        frame_stack: int = 1,
        seed: int = 0,
        allocate: Allocate = np.empty,
    ) -> None:
        """Reserves memory, which is committed page by page as it is written.

        fields, frame_stack: see `row_specs`. capacity: in transitions. allocate: makes an array of
        a shape and dtype.

        Raises ValueError when the capacity has no room for two rollouts, and MemoryError when so
        much memory cannot be reserved.
        """
        self.unroll_length = fields["reward"].shape[0] - 1
        self.capacity = capacity
        self.frame_stack = frame_stack
        self.bytes_per_transition = bytes_per_transition(fields, frame_stack)
        _check_capacity(capacity, self.unroll_length)
        self._specs = row_specs(fields, frame_stack)
        self._reserve(allocate)
        self._prepare_sampling(seed)
        self._clear(first_chunk=0)

    def _reserve(self, allocate: Allocate) -> None:
        num_chunks = self.capacity // self.unroll_length
        others = {name: nest for name, nest in self._specs.items() if name != "observation"}
        specs = [*flatten(others), *flatten(self._specs["observation"])]
        try:
            self._ring = ChunkRing(specs, self.unroll_length, num_chunks, allocate)
            episodes = EpisodeList(num_chunks * self.unroll_length, allocate)
        except MemoryError:
            total = self.capacity * self.bytes_per_transition
            raise MemoryError(
                f"a replay of {self.capacity} transitions takes {total} bytes of memory, "
                f"{self.bytes_per_transition} each, which cannot be reserved"
            ) from None
        count = len(flatten(others))
        self._others, self._frames = self._ring.leaves[:count], self._ring.leaves[count:]
        self._fields: dict[str, Any] = pack_as(others, self._others)  # all but the observation
        ends = self._fields["done"], self._fields["truncated"]
        self._stored = StoredTracks(self._ring, episodes, *ends, self._frames)

    def _clear(self, first_chunk: int) -> None:
        """Forgets everything stored and counted; chunks are numbered from first_chunk on."""
        self._stored.clear(first_chunk)
        self._clear_sampling()
        self._open: dict[tuple[int, int], Track] = {}  # by agent and environment: may be continued
        self.inserted = 0
        self.sampled = 0

    # --- facts

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return self._stored.size

    def facts(self) -> Facts:
        """Returns figures for logs."""
        return Facts(
            fill=len(self._stored.chunks) / self._ring.num_chunks,
            samples_per_insert=self.sampled / max(1, self.inserted),
        )

    # --- inserting

    def insert(self, arrays: Arrays, columns: slice, agent: int) -> None:
        """Stores columns of a batch of rollouts.

        arrays: with final_observation, leaves [K, *shape] of the truncations in rows 1..T of all
        columns, by column, then row. agent: number of the agent that acted.

        A rollout whose rollout_index does not follow its environment's last one begins a new track.

        Raises ValueError when rollouts have another length, when the observations of one are no
        stacks, and when one does not begin with the last row of the rollout it follows. The columns
        before that one have been stored.
        """
        steps = arrays["reward"].shape[0] - 1
        if steps != self.unroll_length:
            raise ValueError(
                f"the replay stores rollouts of {self.unroll_length} steps, not {steps}"
            )
        for column in columns_of(arrays, self._fields, columns):
            column.check_stacks(self.frame_stack)
            self._insert(column, agent)

    def new_source(self, agent: int) -> None:
        """Announces that the agent's next rollouts are from another source, such as a resumed
        run's, which counts them from zero: none of them follows one that is stored.
        """
        self._open = {key: track for key, track in self._open.items() if key[0] != agent}

    def _insert(self, column: RolloutColumn, agent: int) -> None:
        track = self._open.get((agent, column.env_index))
        if track is None or column.rollout != track.rollout + 1:
            track = self._begin(column, agent)
        else:
            self._check_follows(column, track)
        track.rollout = column.rollout
        rows = self._stored.extend(track)
        self._write(column, 1, rows)
        self._note_rows(track)
        finals = [newest(leaf, self.frame_stack).copy() for leaf in column.finals]
        self._stored.finish(track, finals)
        self.inserted += self.unroll_length

    def _begin(self, column: RolloutColumn, agent: int) -> Track:
        """Begins a track with row 0, in a chunk of zeros."""
        if len(self._open) >= _MANY_ENVIRONMENTS + 2 * self._ring.num_chunks:
            self._forget_overwritten()
        track = Track(agent, column.env_index, column.rollout, self.unroll_length)
        self._open[agent, column.env_index] = track
        rows = self._stored.extend(track)
        for leaf in self._ring.leaves:
            leaf[rows] = 0
        self._write(column, 0, slice(rows.stop - 1, rows.stop))
        self._note_rows(track)
        self._stored.finish(track, [])
        return track

    def _forget_overwritten(self) -> None:
        """Forgets tracks without a stored row: most are of environments that left the run."""
        self._open = {key: track for key, track in self._open.items() if track.start < track.end}

    def _write(self, column: RolloutColumn, first: int, ring_rows: slice) -> None:
        """Copies rows first, first + 1, ... of a column to the ring."""
        rows = slice(first, first + ring_rows.stop - ring_rows.start)
        for to, leaf in zip(self._others, column.others, strict=True):
            to[ring_rows] = leaf[rows]
        for to, leaf in zip(self._frames, column.stacks, strict=True):
            to[ring_rows] = newest(leaf[rows], self.frame_stack)

    def _check_follows(self, column: RolloutColumn, track: Track) -> None:
        """Raises ValueError unless row 0 of the column is the track's last row."""
        last = track.end - 1
        if last < track.start:
            return  # overwritten
        row = int(track.ring_rows(np.array([last]), self._ring)[0])
        for name, rows in column.repeated.items():
            self._require_same(column, name, rows[0], self._fields[name][row])
        frame_rows = self._frame_rows_of_last(track)
        for stacks, frames in zip(column.stacks, self._frames, strict=True):
            self._require_same(column, "observation", stacks[0], frames[frame_rows])

    def _frame_rows_of_last(self, track: Track) -> np.ndarray:
        """Returns the ring rows of the frames in the stack of the last row, oldest first; only of
        the newest frame where the episode's first row is not stored.
        """
        last, first = track.end - 1, track.episode
        is_known = first is not None and first >= track.start
        start, num_frames = (first, self.frame_stack) if is_known else (last, 1)
        positions = stack_positions(np.array([last]), np.array([start]), num_frames)
        return track.ring_rows(positions[0], self._ring)

    def _require_same(self, column: RolloutColumn, name: str, first: Any, last: Any) -> None:
        if not first.tobytes().endswith(last.tobytes()):
            raise ValueError(
                f"{column} does not begin with the last row of the rollout before: {name} differs"
            )

    # --- files

    def save(self, file: BinaryIO) -> None:
        """Writes the contents and the state of sampling, chunk by chunk."""
        tracks = self._stored.tracks(self._open.values())
        header = {
            **self._description(),
            "first_chunk": self._stored.chunks.start,
            "chunks": len(self._stored.chunks),
            "tracks": [self._saved(track) for track in tracks],
            "episodes": len(self._stored.episodes),
            "inserted": self.inserted,
            "sampled": self.sampled,
            **self._sampling_state(),
        }
        writer = ReplayWriter(file, header)
        self._stored.write(writer, tracks)
        writer.array(self._stored.episodes.rows)
        for array in self._sampling_arrays():
            writer.array(array)
        writer.end()

    def load(self, file: BinaryIO) -> None:
        """Replaces the contents by those that `save` wrote, as far as they fit the capacity: the
        newest. A replay of the same capacity then samples as the saved one would have.

        A resumed run calls `new_source` afterwards.

        Raises ValueError, and leaves the replay empty, when the file is damaged or was saved by a
        replay of other rows.
        """
        try:
            self._load(ReplayReader(file))
        except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            self._clear(first_chunk=0)
            raise ValueError(f"the saved replay is damaged: {error!r}") from None
        except ValueError as error:
            self._clear(first_chunk=0)
            raise ValueError(f"the saved replay cannot be used: {error}") from None

    def _load(self, reader: ReplayReader) -> None:
        header = reader.header
        self._check_alike(header)
        self._clear(integer(header["first_chunk"]))
        tracks = [self._restored(*entry) for entry in header["tracks"]]
        chunks, count = integer(header["chunks"]), integer(header["episodes"])
        self._stored.read(reader, tracks, chunks)
        require(count <= chunks * self.unroll_length, f"it cannot have {count} episodes")
        order = reader.array((count,), "int64").tolist()
        saved = self._read_sampling_arrays(reader, chunks)
        reader.end()
        episodes = self._stored.episodes
        episodes.reorder([row for row in order if row in episodes])
        self.inserted, self.sampled = integer(header["inserted"]), integer(header["sampled"])
        self._restore_sampling(header, saved)

    def _saved(self, track: Track) -> list[int]:
        """Returns a track without its chunks, as JSON values."""
        is_open = self._open.get((track.agent, track.env_index)) is track
        return [track.agent, track.env_index, track.rollout, track.overwritten, int(is_open)]

    def _restored(self, *entry: int) -> Track:
        agent, env_index, rollout, overwritten, is_open = map(integer, entry)
        track = Track(agent, env_index, rollout, self.unroll_length, overwritten)
        if is_open:
            self._open[agent, env_index] = track
        return track

    def _description(self) -> dict[str, Any]:
        """Returns what a file and the replay that loads it must have in common, as JSON values."""
        return {
            "unroll_length": self.unroll_length,
            "frame_stack": self.frame_stack,
            "rows": described(self._specs),
        }

    def _check_alike(self, header: dict[str, Any]) -> None:
        for name, own in self._description().items():
            saved = header[name]
            require(saved == own, f"its {name} is {saved}, that of this replay {own}")

    # --- what the kinds of replay define

    @abstractmethod
    def _prepare_sampling(self, seed: int) -> None:
        """Makes what sampling needs, once the memory is reserved."""

    @abstractmethod
    def _clear_sampling(self) -> None:
        """Forgets everything that refers to stored rows."""

    @abstractmethod
    def _note_rows(self, track: Track) -> None:
        """Takes note of a track's newest chunk, which is written; its ends are not noted yet."""

    @abstractmethod
    def _sampling_state(self) -> dict[str, Any]:
        """Returns what `_restore_sampling` needs, as JSON values."""

    def _sampling_arrays(self) -> list[np.ndarray]:
        """Returns what is too large for JSON of the state of sampling."""
        return []

    def _read_sampling_arrays(self, reader: ReplayReader, chunks: int) -> list[np.ndarray]:
        """Reads what `_sampling_arrays` returned; chunks: number of them in the file."""
        return []

    @abstractmethod
    def _restore_sampling(self, state: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Takes over a state, after the rows."""


def _check_capacity(capacity: int, unroll_length: int) -> None:
    least = 2 * unroll_length
    require(
        least <= capacity < 2**31,
        f"a replay has room for 2 rollouts of {unroll_length} steps or more, {least} to "
        f"{2**31 - 1} transitions; got {capacity}",
    )
