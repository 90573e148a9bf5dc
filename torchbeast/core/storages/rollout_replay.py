# SPDX-License-Identifier: Apache-2.0
"""A replay of whole episodes, of which windows of T + 1 consecutive rows are sampled, as in LASER
(Schmitt, Hessel, Simonyan 2019, arXiv 1909.11583).

    insert    columns [T+1, B] --> rows 1..T, newest frames only --> ring of chunks
    draw      one of the complete episodes, then one of its rows, both uniformly
    walk      an episode from its first row on, T rows at a time
    read      rows of the ring, stacks rebuilt --> straight into a column [T+1] of a batch

An episode is what lies between two rows that are `done`. It can be sampled as soon as its end and
the T + 1 rows from its first one on are stored, until its first row is overwritten: first in, first
out. A window may run on into the environment's next episode, as rollouts do. Recurrent state is not
stored.

Thread safety: none; one thread makes all calls. A window is valid until the next insert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.nest_py import flatten, pack_as
from torchbeast.core.storages.chunk_ring import Allocate, ChunkRing
from torchbeast.core.storages.episode_sampler import EpisodeSampler, Window
from torchbeast.core.storages.episodes import EpisodeList
from torchbeast.core.storages.frame_stacks import copy_runs, newest, runs, stack_positions
from torchbeast.core.storages.replay_file import ReplayReader, ReplayWriter, integer
from torchbeast.core.storages.rollout_columns import RolloutColumn, columns_of
from torchbeast.core.storages.stored_rows import bytes_per_transition, described, row_specs
from torchbeast.core.storages.stored_tracks import StoredTracks
from torchbeast.core.storages.tracks import Track

Arrays = Mapping[str, Any]  # a field of Rollout -> its nest of arrays
Final = tuple[int, list[np.ndarray]]  # row of a truncation; leaves of its final observation

NO_ROLLOUT = -1  # the rollout_index of a window


class Facts(NamedTuple):
    """Figures for logs."""

    fill: float  # share of the memory in use; at 1.0 every rollout overwrites the oldest
    samples_per_insert: float  # steps read per step inserted, since the beginning


class RolloutReplay:
    """Rollouts joined to episodes, at most `capacity` transitions.

        replay.insert(arrays, slice(0, 8), agent=0)
        if replay.episodes:
            window = replay.draw()                   or replay.walk(0, 0), for recurrent networks
            finals = replay.read(window, batch, column=8)

    `arrays` and `batch` are dicts of numpy arrays [T+1, B, ...] by field of Rollout, and may be
    views of torch's memory.

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
        self._sampler = EpisodeSampler(self._stored, self.unroll_length, seed)
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
        self._sampler.clear()
        self._open: dict[tuple[int, int], Track] = {}  # by agent and environment: may be continued
        self.inserted = 0
        self.sampled = 0

    # --- facts

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return self._stored.size

    @property
    def episodes(self) -> int:
        """The number of episodes that can be sampled."""
        return len(self._stored.episodes)

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
        self._write(column, 1, self._stored.extend(track))
        finals = [newest(leaf, self.frame_stack).copy() for leaf in column.finals]
        self._stored.finish(track, finals)
        self.inserted += self.unroll_length

    def _begin(self, column: RolloutColumn, agent: int) -> Track:
        """Begins a track with row 0, in a chunk of zeros."""
        track = Track(agent, column.env_index, column.rollout, self.unroll_length)
        self._open[agent, column.env_index] = track
        rows = self._stored.extend(track)
        for leaf in self._ring.leaves:
            leaf[rows] = 0
        self._write(column, 0, slice(rows.stop - 1, rows.stop))
        self._stored.finish(track, [])
        return track

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

    # --- sampling

    def draw(self) -> Window:
        """Returns a window that begins at any row of any episode, both drawn uniformly, for which T
        rows after it are stored. LookupError when there is no episode.
        """
        return self._sampler.draw()

    def walk(self, agent: int, number: int) -> Window:
        """Returns the next window of a walk through an episode, T rows after the last one.

        agent, number: of the agent that learns from it, and of its walk. The episode may be
        another agent's.

        Where the episode is over or overwritten, or no T rows are stored any further, the walk goes
        on at the beginning of another (`Window.begins`). LookupError when there is no episode.
        """
        return self._sampler.walk(agent, number)

    def forget_walks(self, agent: int) -> None:
        """Lets every walk of an agent go on at the beginning of another episode."""
        self._sampler.forget_walks(agent)

    # --- reading

    def read(self, window: Window, batch: Arrays, column: int) -> list[Final]:
        """Writes a window into a column of a batch, and returns the final observations of the
        truncations in its rows 1..T, in order.

        batch: the fields that were inserted. `rollout_index` becomes NO_ROLLOUT. Raises ValueError
        when the window has been overwritten.
        """
        self._check_stored(window)
        positions = np.arange(window.position, window.position + self.unroll_length + 1)
        self._read_others(window.track, positions, batch, column)
        starts = np.where(batch["done"][:, column], positions, window.episode)
        frames = stack_positions(positions, np.maximum.accumulate(starts), self.frame_stack)
        frame_rows = window.track.ring_rows(frames, self._ring)
        self._read_stacks(frame_rows, [leaf[:, column] for leaf in flatten(batch["observation"])])
        self.sampled += self.unroll_length
        cuts = 1 + np.flatnonzero(batch["truncated"][1:, column])
        return [
            (row, self._final(window.track.row(window.position + row), frame_rows[row - 1]))
            for row in cuts.tolist()
        ]

    def _check_stored(self, window: Window) -> None:
        require(
            window.episode >= window.track.start,
            "the window's episode was overwritten: read windows before the next insert",
        )

    def _read_others(self, track: Track, positions: np.ndarray, batch: Arrays, column: int) -> None:
        """Writes all fields but the observation."""
        rows = runs(track.ring_rows(positions, self._ring))
        leaves = flatten({name: batch[name] for name in self._fields})
        for leaf, source in zip(leaves, self._others, strict=True):
            copy_runs(leaf[:, column], source, rows)
        batch["env_index"][:, column] = track.env_index
        batch["rollout_index"][:, column] = NO_ROLLOUT

    def _read_stacks(self, frame_rows: np.ndarray, stacks: list[np.ndarray]) -> None:
        """Copies frames to stacks [T+1, k * C, ...]; frame_rows: their ring rows [T+1, k]."""
        by_place = [runs(rows) for rows in frame_rows.T]
        for stack, frames in zip(stacks, self._frames, strict=True):
            if self.frame_stack == 1:
                copy_runs(stack, frames, by_place[0])
                continue
            size = frames.shape[1]
            for place, rows in enumerate(by_place):
                copy_runs(stack[:, place * size : (place + 1) * size], frames, rows)

    def _final(self, row: int, before: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of the final observation of a truncated row.

        before: ring rows [k] of the frames in the stack of the row before.
        """
        finals = self._stored.final(row)
        if self.frame_stack == 1:
            return finals
        return [
            np.concatenate([*frames[before[1:]], final])
            for frames, final in zip(self._frames, finals, strict=True)
        ]

    # --- files

    def save(self, file: BinaryIO) -> None:
        """Writes the contents, the walks and the random generator's state, chunk by chunk."""
        tracks = self._stored.tracks(self._open.values())
        header = {
            **self._description(),
            "first_chunk": self._stored.chunks.start,
            "chunks": len(self._stored.chunks),
            "tracks": [self._saved(track) for track in tracks],
            "episodes": len(self._stored.episodes),
            "inserted": self.inserted,
            "sampled": self.sampled,
            **self._sampler.state(),
        }
        writer = ReplayWriter(file, header)
        self._stored.write(writer, tracks)
        writer.array(self._stored.episodes.rows)
        writer.end()

    def load(self, file: BinaryIO) -> None:
        """Replaces the contents by those that `save` wrote, as far as they fit the capacity: the
        newest. A replay of the same capacity then samples as the saved one would have.

        A resumed run calls `new_source` afterwards, and `forget_walks` if it has not kept the
        recurrent states.

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
        reader.end()
        episodes = self._stored.episodes
        episodes.reorder([row for row in order if row in episodes])
        self.inserted, self.sampled = integer(header["inserted"]), integer(header["sampled"])
        self._sampler.restore(header)

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


def _check_capacity(capacity: int, unroll_length: int) -> None:
    least = 2 * unroll_length
    require(
        least <= capacity < 2**31,
        f"a replay has room for 2 rollouts of {unroll_length} steps or more, {least} to "
        f"{2**31 - 1} transitions; got {capacity}",
    )
