# SPDX-License-Identifier: Apache-2.0
"""Rollouts joined to tracks, in a ring: what the replays have in common.

    insert    columns [T+1, B] --> rows 1..T, newest frames only --> ring of chunks

First in, first out. Recurrent state is not stored.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchbeast.core.checks import at_least, require
from torchbeast.core.envs.frame_stack import (
    continue_stacks,
    frame_spec,
    newest,
    repeat_a_frame,
)
from torchbeast.core.envs.spaces import ArraySpec, num_bytes
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.replay_file import ReplayReader, ReplayWriter, integer
from torchbeast.core.storages.tracks import (
    BYTES_PER_ROW,
    Allocate,
    Track,
    TrackRing,
)


class RolloutColumn(NamedTuple):
    """One rollout."""

    env_index: int
    rollout: int  # rollout_index
    done: np.ndarray  # bool [T+1]
    truncated: np.ndarray  # bool [T+1]
    others: list[np.ndarray]  # leaves [T+1, *shape] of the stored fields except the observation
    stacks: list[np.ndarray]  # leaves [T+1, k * C, ...] of the observation
    finals: list[np.ndarray]  # leaves [K, k * C, ...]; [] without truncations

    def __str__(self) -> str:
        return f"rollout {self.rollout} of environment {self.env_index}"

    def check_stacks(self, num_frames: int) -> None:
        """Raises ValueError unless every stack of k = num_frames frames follows from the row before
        it, so that it can be rebuilt from single frames.
        """
        if num_frames == 1:
            return
        done, rows_before = self.done, np.flatnonzero(self.truncated[1:])
        for stacks in self.stacks:
            sound = np.ones(len(stacks), bool)
            sound[1:] = continue_stacks(stacks[1:], stacks[:-1], num_frames)
            sound[done] = repeat_a_frame(stacks[done], num_frames)
            self._require_stacks(sound, np.arange(len(stacks)), "observation")
        for finals, stacks in zip(self.finals, self.stacks, strict=False):
            sound = continue_stacks(finals, stacks[rows_before], num_frames)
            self._require_stacks(sound, rows_before + 1, "final observation")

    def _require_stacks(self, sound: np.ndarray, rows: np.ndarray, name: str) -> None:
        if not sound.all():
            raise ValueError(
                f"{self}: the {name} of row {rows[~sound][0]} is no stack that continues the row "
                "before it; give frame_stack 1 to store observations whole"
            )


def columns_of(
    arrays: Mapping[str, Any], others: Collection[str], columns: slice
) -> Iterator[RolloutColumn]:
    """Yields columns of a batch.

    arrays: by field, with final_observation. others: the fields that are stored beside the
    observation.
    """
    leaves = flatten({name: arrays[name] for name in others})
    stacks, finals = flatten(arrays["observation"]), flatten(arrays["final_observation"])
    counts = arrays["truncated"][1:].sum(axis=0)
    ends = counts.cumsum()
    for column in range(*columns.indices(len(counts))):
        own = slice(int(ends[column] - counts[column]), int(ends[column]))
        yield RolloutColumn(
            env_index=int(arrays["env_index"][0, column]),
            rollout=int(arrays["rollout_index"][0, column]),
            done=arrays["done"][:, column],
            truncated=arrays["truncated"][:, column],
            others=[leaf[:, column] for leaf in leaves],
            stacks=[leaf[:, column] for leaf in stacks],
            finals=[leaf[own] for leaf in finals] if counts[column] else [],
        )


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
        self._generator = np.random.default_rng(seed)
        self._clear(first_chunk=0)

    def _reserve(self, allocate: Allocate) -> None:
        num_chunks = self.capacity // self.unroll_length
        try:
            self._ring = TrackRing(self._specs, self.unroll_length, num_chunks, allocate)
        except MemoryError:
            total = self.capacity * self.bytes_per_transition
            raise MemoryError(
                f"a replay of {self.capacity} transitions takes {total} bytes of memory, "
                f"{self.bytes_per_transition} each, which cannot be reserved"
            ) from None

    def _clear(self, first_chunk: int) -> None:
        """Forgets everything stored and counted; chunks are numbered from first_chunk on."""
        self._ring.clear(first_chunk)
        self._clear_sampling()
        self._open: dict[tuple[int, int], Track] = {}  # by agent and environment: may be continued
        self.inserted = 0
        self.sampled = 0

    # --- facts

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return self._ring.size

    def facts(self) -> Facts:
        """Returns figures for logs."""
        return Facts(
            fill=len(self._ring.chunks) / self._ring.num_chunks,
            samples_per_insert=self.sampled / max(1, self.inserted),
        )

    # --- inserting

    def insert(self, arrays: Arrays, columns: slice, agent: int) -> None:
        """Stores columns of a batch of rollouts.

        arrays: with final_observation, leaves [K, *shape] of the truncations in rows 1..T of all
        columns, by column, then row. agent: number of the agent that acted.

        A rollout whose rollout_index does not follow its environment's last one begins a new track.

        Raises ValueError when rollouts have another length, and when the observations of one
        are no stacks. The columns before that one have been stored.
        """
        steps = arrays["reward"].shape[0] - 1
        if steps != self.unroll_length:
            raise ValueError(
                f"the replay stores rollouts of {self.unroll_length} steps, not {steps}"
            )
        for column in columns_of(arrays, self._ring.fields, columns):
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
        track.rollout = column.rollout
        rows = self._ring.extend(track)
        self._write(column, 1, rows)
        self._note_rows(track)
        finals = [newest(leaf, self.frame_stack).copy() for leaf in column.finals]
        self._ring.finish(track, finals)
        self.inserted += self.unroll_length

    def _begin(self, column: RolloutColumn, agent: int) -> Track:
        """Begins a track with row 0, in a chunk of zeros."""
        if len(self._open) >= _MANY_ENVIRONMENTS + 2 * self._ring.num_chunks:
            self._forget_overwritten()
        track = Track(agent, column.env_index, column.rollout, self.unroll_length)
        self._open[agent, column.env_index] = track
        rows = self._ring.extend(track)
        for leaf in (*self._ring.others, *self._ring.frames):
            leaf[rows] = 0
        self._write(column, 0, slice(rows.stop - 1, rows.stop))
        self._note_rows(track)
        self._ring.finish(track, [])
        return track

    def _forget_overwritten(self) -> None:
        """Forgets tracks without a stored row: most are of environments that left the run."""
        self._open = {key: track for key, track in self._open.items() if track.start < track.end}

    def _write(self, column: RolloutColumn, first: int, ring_rows: slice) -> None:
        """Copies rows first, first + 1, ... of a column to the ring."""
        rows = slice(first, first + ring_rows.stop - ring_rows.start)
        for to, leaf in zip(self._ring.others, column.others, strict=True):
            to[ring_rows] = leaf[rows]
        for to, leaf in zip(self._ring.frames, column.stacks, strict=True):
            to[ring_rows] = newest(leaf[rows], self.frame_stack)

    # --- files

    def save(self, file: BinaryIO) -> None:
        """Writes the contents and the state of sampling, chunk by chunk."""
        tracks = self._ring.tracks(self._open.values())
        header = {
            **self._description(),
            "first_chunk": self._ring.chunks.start,
            "chunks": len(self._ring.chunks),
            "tracks": [self._saved(track) for track in tracks],
            "episodes": len(self._ring.episodes),
            "inserted": self.inserted,
            "sampled": self.sampled,
            **self._sampling_state(),
            "generator": self._generator.bit_generator.state,
        }
        writer = ReplayWriter(file, header)
        self._ring.write(writer, tracks)
        writer.array(self._ring.episodes.rows)
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
        self._ring.read(reader, tracks, chunks)
        require(count <= chunks * self.unroll_length, f"it cannot have {count} episodes")
        order = reader.array((count,), "int64").tolist()
        saved = self._read_sampling_arrays(reader, chunks)
        reader.end()
        episodes = self._ring.episodes
        episodes.reorder([row for row in order if row in episodes])
        self.inserted, self.sampled = integer(header["inserted"]), integer(header["sampled"])
        self._generator.bit_generator.state = header["generator"]
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
    def _clear_sampling(self) -> None:
        """Begins with nothing that refers to stored rows."""

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


_NOT_STORED = ("initial_agent_state", "final_observation", "env_index", "rollout_index", "info")


def row_specs(fields: Mapping[str, Any], frame_stack: int) -> dict[str, Any]:
    """Returns what is stored of a row: a nest of ArraySpec for each field.

    fields: a nest of ArraySpec [T+1, B, *shape] for each field of Rollout. frame_stack: number of
    frames in every leaf of an observation, of which one is stored.

    Raises ValueError when a leaf cannot be a stack of so many frames.
    """
    at_least(1, frame_stack=frame_stack)
    rows: dict[str, Any] = {
        name: map_leaves(lambda spec: ArraySpec(spec.shape[2:], spec.dtype), nest)
        for name, nest in fields.items()
        if name not in _NOT_STORED
    }
    stacks = rows["observation"]
    rows["observation"] = map_leaves(lambda stack: frame_spec(stack, frame_stack), stacks)
    return rows


def bytes_per_transition(fields: Mapping[str, Any], frame_stack: int) -> int:
    """Returns the bytes of memory that a stored transition takes at most, without those of
    `bytes_per_truncation`. The arguments are those of `row_specs`.
    """
    return num_bytes(row_specs(fields, frame_stack)) + BYTES_PER_ROW


def bytes_per_truncation(fields: Mapping[str, Any], frame_stack: int) -> int:
    """Returns the bytes of the frames of a final observation, which each stored truncation takes
    besides. The arguments are those of `row_specs`.
    """
    return num_bytes(row_specs(fields, frame_stack)["observation"])


def described(rows: Mapping[str, Any]) -> list[str]:
    """Returns a line for each leaf of `row_specs`, such as "action int64 []"; two lists are equal
    if the same bytes mean the same in both.
    """
    return [
        f"{name} {leaf.dtype} {list(leaf.shape)} {sys.byteorder}-endian"
        for name, nest in sorted(rows.items())
        for leaf in flatten(nest)
    ]
