# SPDX-License-Identifier: Apache-2.0
"""Rollouts joined to trajectories, in a ring: what the replays have in common.

    insert    columns [T+1, B] --> rows 1..T, newest frames only --> ring of chunks

First in, first out. Of recurrent states only R2D2's are stored, among the extras.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.envs.frame_stack import frame_spec, newest
from torchbeast.core.envs.spaces import ArraySpec, num_bytes
from torchbeast.core.storages.replay.file import LARGEST_COUNT, ReplayReader, ReplayWriter, integer
from torchbeast.core.storages.replay.trajectories import Trajectory, TrajectoryRing

Arrays = Mapping[str, Any]  # a field of Rollout -> its nest of arrays


AGENT = 0  # the number of the only agent of a replay that is not shared
_MANY_ENVIRONMENTS = 10_000  # more may have left the run
_SMALLEST = 1e-6  # priority, so that everything is sampled now and then


class SumTree:
    """Priorities of `size` entries, all 0 at first. All methods take arrays of any length."""

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(0, size - 1).bit_length()
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sums[1])

    def priorities(self, entries: np.ndarray) -> np.ndarray:
        """Returns the priorities of entries; float64 of their shape."""
        return self._sums[self._leaves + entries]

    def set(self, entries: np.ndarray, priorities: np.ndarray | float) -> None:
        """Sets the priorities of entries; the last one counts of an entry that is given twice.

        Raises ValueError unless they are finite and at least 0.
        """
        require(
            bool(np.isfinite(priorities).all() and (np.asarray(priorities) >= 0).all()),
            f"priorities must be finite and at least 0, got {priorities}",
        )
        nodes = self._leaves + entries
        self._sums[nodes] = priorities
        while len(nodes) and nodes[0] > 1:  # all are on one level
            nodes = nodes // 2
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, targets: np.ndarray) -> np.ndarray:
        """Returns for each target in [0, total) the entry i for which sum(p[:i]) <= target and
        target < sum(p[:i+1]); int64 of its shape.
        """
        nodes = np.ones(targets.shape, np.int64)
        for _ in range(self._leaves.bit_length() - 1):
            left = self._sums[2 * nodes]
            # A sum that is rounded may send a target beyond the last entry that has a priority.
            goes_right = (targets >= left) & (self._sums[2 * nodes + 1] > 0)
            targets = np.where(goes_right, targets - left, targets)
            nodes = 2 * nodes + goes_right
        return nodes - self._leaves


class ReplayStats(NamedTuple):
    """Figures for logs."""

    fill: float  # share of the memory in use; at 1.0 every rollout overwrites the oldest
    samples_per_insert: float  # steps read per step inserted, since the beginning
    size: int  # stored transitions
    episodes: int  # complete ones, of which windows can be sampled


class RolloutStore(ABC):
    """Rollouts joined to trajectories, at most `capacity` transitions.

        store.insert(arrays)

    `arrays` is a dict of numpy arrays [T+1, B, ...] by field of Rollout, which may be views of
    torch's memory.

    inserted, sampled: steps inserted and read so far. lock: hold it for every call but
    `stats`, if several threads make calls; `insert` and `fill` of a RolloutReplay take it.
    """

    def __init__(
        self,
        fields: Arrays,
        capacity: int,
        frame_stack: int = 1,
        seed: int = 0,
        exponent: float | None = None,
    ) -> None:
        """Reserves memory, which is committed page by page as it is written.

        fields, frame_stack: see `row_specs`. capacity: in transitions, at least two rollouts.
        exponent: alpha of the priorities of rows; None: without priorities.
        """
        self._exponent = exponent
        self.unroll_length = fields["reward"].shape[0] - 1
        self.capacity = capacity
        self.frame_stack = frame_stack
        self._specs = row_specs(fields, frame_stack)
        num_chunks = capacity // self.unroll_length
        self._ring = TrajectoryRing(self._specs, self.unroll_length, num_chunks)
        self._generator = np.random.default_rng(seed)
        self.lock = threading.Lock()
        self._clear(first_chunk=0)

    def _clear(self, first_chunk: int) -> None:
        """Forgets everything stored and counted; chunks are numbered from first_chunk on."""
        self._ring.clear(first_chunk)
        self._tree = SumTree(1 if self._exponent is None else self._ring.num_rows)  # of ring rows
        self._clear_sampling()
        # By agent and environment: may be continued.
        self._open: dict[tuple[int, int], Trajectory] = {}
        self.inserted = 0
        self.sampled = 0

    # --- statistics

    @property
    def size(self) -> int:
        """The number of stored transitions."""
        return self._ring.size

    def stats(self) -> ReplayStats:
        """Returns metrics for logs."""
        return ReplayStats(
            fill=len(self._ring.chunks) / self._ring.num_chunks,
            samples_per_insert=self.sampled / max(1, self.inserted),
            size=self.size,
            episodes=len(self._ring.episodes),
        )

    # --- inserting

    def insert(self, arrays: Arrays, agent: int = AGENT) -> None:
        """Stores a batch of rollouts.

        arrays: with final_observation, leaves [K, *shape] of the truncations in rows 1..T, by
        column, then row. agent: number of the agent that acted.

        A rollout whose rollout_index does not follow its environment's last one begins a new
        trajectory.
        """
        for _ in self._inserted(arrays, agent):
            pass

    def _inserted(self, arrays: Arrays, agent: int) -> Iterator[Trajectory]:
        """Stores one column after the other, and yields its trajectory."""
        leaves = flatten({name: arrays[name] for name in self._ring.fields})
        stacks, finals = flatten(arrays["observation"]), flatten(arrays["final_observation"])
        ends = [0, *arrays["truncated"][1:].sum(axis=0).cumsum().tolist()]
        for column, (start, end) in enumerate(pairwise(ends)):
            rows = [leaf[:, column] for leaf in leaves]
            rows += [newest(stack[:, column], self.frame_stack) for stack in stacks]
            frames = [newest(leaf[start:end], self.frame_stack).copy() for leaf in finals]
            env_index = int(arrays["env_index"][0, column])
            rollout = int(arrays["rollout_index"][0, column])
            trajectory = self._open.get((agent, env_index))
            if trajectory is None or rollout != trajectory.rollout + 1:
                new = Trajectory(agent, env_index, rollout, self.unroll_length)
                trajectory = self._begin(new, rows)
            trajectory.rollout = rollout
            self._append(trajectory, rows, frames if start < end else [])
            self.inserted += self.unroll_length
            yield trajectory

    def new_source(self, agent: int = AGENT) -> None:
        """Announces that the agent's next rollouts are from another source, such as a resumed
        run's, which counts them from zero: none of them follows one that is stored.
        """
        self._open = {key: trajectory for key, trajectory in self._open.items() if key[0] != agent}

    def _begin(self, trajectory: Trajectory, rows: list[np.ndarray]) -> Trajectory:
        """Begins a trajectory with row 0 of a rollout, in a chunk of zeros."""
        if len(self._open) >= _MANY_ENVIRONMENTS + 2 * self._ring.num_chunks:
            # Most trajectories without a stored row are of environments that left the run.
            self._open = {key: old for key, old in self._open.items() if old.start < old.end}
        self._open[trajectory.agent, trajectory.env_index] = trajectory
        row_0 = [np.zeros_like(leaf) for leaf in rows]
        for alone, leaf in zip(row_0, rows, strict=True):
            alone[-1] = leaf[0]
        self._append(trajectory, row_0, [])
        return trajectory

    def _append(
        self, trajectory: Trajectory, rows: list[np.ndarray], finals: list[np.ndarray]
    ) -> None:
        """Copies rows 1..T of leaves [T+1, *shape] to the next chunk of a trajectory.

        finals: see TrajectoryRing.finish.
        """
        ring_rows = self._ring.extend(trajectory)
        for to, leaf in zip(self._ring.leaves, rows, strict=True):
            to[ring_rows] = leaf[1:]
        if self._exponent is not None:
            rows_of_chunk = np.arange(ring_rows.start, ring_rows.stop)
            self._tree.set(rows_of_chunk, self._first_priority(trajectory))
        self._note_rows(trajectory)
        self._ring.finish(trajectory, finals)

    def _set_priorities(self, names: np.ndarray, errors: np.ndarray) -> float:
        """Sets the priorities [N] of rows by the sizes of their errors; returns the largest.
        Whatever has overwritten a row keeps its own.
        """
        is_stored = names >= self._ring.rows.start
        sizes = np.abs(errors[is_stored]).astype(np.float64) + _SMALLEST
        priorities = sizes**self._exponent
        self._tree.set(names[is_stored] % self._ring.num_rows, priorities)
        return float(priorities.max(initial=0.0))

    # --- files

    def save(self, file: BinaryIO) -> None:
        """Writes the contents and the state of sampling, chunk by chunk."""
        trajectories = self._ring.trajectories(self._open.values())
        has_priorities = self._exponent is not None
        header = {
            **self._description(),
            "first_chunk": self._ring.chunks.start,
            "chunks": len(self._ring.chunks),
            "tracks": [self._saved(trajectory) for trajectory in trajectories],
            "episodes": len(self._ring.episodes),
            "inserted": self.inserted,
            "sampled": self.sampled,
            **self._sampling_state(),
            "has_priorities": has_priorities,
            "exponent": self._exponent,
            "generator": self._generator.bit_generator.state,
        }
        writer = ReplayWriter(file, header)
        self._ring.write(writer, trajectories)
        writer.array(np.array(self._ring.episodes.rows, np.int64))
        if has_priorities:
            rows = np.array(self._ring.rows, np.int64) % self._ring.num_rows
            writer.array(self._tree.priorities(rows))
        writer.end()

    def load(self, file: BinaryIO) -> None:
        """Replaces the contents by what `save` wrote and the capacity can hold: the
        newest. A replay of the same capacity then samples as the saved one would have.

        A resumed run calls `new_source` afterwards.

        Raises ValueError, and leaves the replay empty, when the file is damaged or was saved by a
        replay of other rows.
        """
        try:
            self._load(ReplayReader(file))
        except (LookupError, TypeError, AttributeError, OverflowError, ValueError) as error:
            self._clear(first_chunk=0)
            is_said = isinstance(error, ValueError)
            how = f"cannot be used: {error}" if is_said else f"is damaged: {error!r}"
            raise ValueError(f"the saved replay {how}") from None

    def _load(self, reader: ReplayReader) -> None:
        header = reader.header
        for name, own in self._description().items():
            require(header[name] == own, f"its {name} is {header[name]}, not {own}")
        self._clear(integer(header["first_chunk"]))
        trajectories = [self._restored(*entry) for entry in header["tracks"]]
        chunks, count = integer(header["chunks"]), integer(header["episodes"])
        self._ring.read(reader, trajectories, chunks)
        require(count <= chunks * self.unroll_length, f"it cannot have {count} episodes")
        order = reader.array((count,), "int64").tolist()
        has_priorities = bool(header["has_priorities"])
        saved = reader.array((chunks * self.unroll_length * has_priorities,), "float64")
        reader.end()
        self._ring.episodes.reorder([row for row in order if row in self._ring.episodes])
        self.inserted = integer(header["inserted"], LARGEST_COUNT)
        self.sampled = integer(header["sampled"], LARGEST_COUNT)
        self._generator.bit_generator.state = header["generator"]
        if has_priorities and self._exponent is not None:
            rows = np.array(self._ring.rows, np.int64) % self._ring.num_rows
            known = saved[len(saved) - len(rows) :]
            power = self._exponent / (header.get("exponent") or self._exponent or 1.0)
            self._tree.set(rows, np.where(known > 0, known**power, 0.0))
            header["highest"] = header.get("highest", 1.0) ** power
        self._restore_sampling(header, has_priorities)

    def _saved(self, trajectory: Trajectory) -> list[int]:
        """Returns a trajectory without its chunks, as JSON values."""
        agent, env_index = trajectory.agent, trajectory.env_index
        is_open = self._open.get((agent, env_index)) is trajectory
        return [agent, env_index, trajectory.rollout, trajectory.overwritten, int(is_open)]

    def _restored(self, *entry: int) -> Trajectory:
        agent, env_index, rollout, overwritten, is_open = map(integer, entry)
        trajectory = Trajectory(agent, env_index, rollout, self.unroll_length, overwritten)
        if is_open:
            self._open[agent, env_index] = trajectory
        return trajectory

    def _description(self) -> dict[str, Any]:
        """Returns what a file and the replay that loads it must have in common, as JSON values."""
        # A line for each leaf of a row, such as "action int64 []": the same bytes mean the same.
        rows = [
            f"{name} {leaf.dtype} {list(leaf.shape)} {sys.byteorder}-endian"
            for name, nest in sorted(self._specs.items())
            for leaf in flatten(nest)
        ]
        return {"unroll_length": self.unroll_length, "frame_stack": self.frame_stack, "rows": rows}

    # --- what the kinds of replay define

    @abstractmethod
    def _clear_sampling(self) -> None:
        """Begins with nothing that refers to stored rows."""

    def _first_priority(self, trajectory: Trajectory) -> float:
        """Returns the priority of the rows of a trajectory's newest chunk."""
        return 0.0

    def _note_rows(self, trajectory: Trajectory) -> None:  # noqa: B027
        """Notes a trajectory's newest chunk, which is written; its ends are not noted yet."""

    def _sampling_state(self) -> dict[str, Any]:
        """Returns what `_restore_sampling` needs in addition to priorities, as JSON values."""
        return {}

    def _restore_sampling(self, state: dict[str, Any], has_priorities: bool) -> None:  # noqa: B027
        """Takes over a state, after the rows and the priorities, if the file has some."""


_NOT_STORED = ("initial_agent_state", "final_observation", "env_index", "rollout_index", "info")


def row_specs(fields: Mapping[str, Any], frame_stack: int) -> dict[str, Any]:
    """Returns what is stored of a row: a nest of ArraySpec for each field.

    fields: a nest of ArraySpec [T+1, B, *shape] for each field of Rollout. frame_stack: number of
    frames in every leaf of an observation, of which one is stored.
    """
    rows: dict[str, Any] = {
        name: map_leaves(lambda spec: ArraySpec(spec.shape[2:], spec.dtype), nest)
        for name, nest in fields.items()
        if name not in _NOT_STORED
    }
    stacks = rows["observation"]
    rows["observation"] = map_leaves(lambda stack: frame_spec(stack, frame_stack), stacks)
    return rows


def bytes_per_transition(fields: Mapping[str, Any], frame_stack: int) -> int:
    """Returns the bytes of memory that a stored transition takes; a truncated episode takes a final
    observation in addition. Takes the arguments of `row_specs`.
    """
    return num_bytes(row_specs(fields, frame_stack))
