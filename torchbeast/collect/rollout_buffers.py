# SPDX-License-Identifier: Apache-2.0
"""Rollouts in shared memory: written by one worker, copied into batches by the learner.

    slot   [T+1, E, ...]   one rollout of the E environments of one worker
    batch  [T+1, B, ...]   columns of several slots, side by side; spare columns for a replay's

    slots -- Collector.collect(), in one thread --> the batch in preparation
                                                        |            ^
                                                        v            | free again
                                                     batches() of every learner thread

Both have the fields of `Rollout`. A slot stores each frame once, although k rows have it in their
stacks: its observations are frames [T+k, E, ...] (`core/envs/frame_stack.py`), from which the batch
rebuilds the stacks. A slot has room for the final observations of T * E truncated episodes, which
are stacks. The operating system allocates its pages only when they are written.
"""

from __future__ import annotations

import operator
import queue
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.shared_memory import SharedFile, arrays_at, slot_size
from torchbeast.core.actors.contract import Acted
from torchbeast.core.actors.env_loop import EnvRow
from torchbeast.core.base.nest import Nest, flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.envs.contract import write_numbers
from torchbeast.core.envs.frame_stack import frame_spec, rebuild_rows, store_row
from torchbeast.core.envs.spaces import ArraySpec, num_bytes
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.fleets.system import check_buffers, free_memory

RolloutArrays = dict[str, Any]  # a field of Rollout -> its nest of arrays


class SharedRollouts(SharedFile):
    """`num_slots` rollouts of `num_envs` environments each, in one shared file."""

    def __init__(
        self, spec: RolloutSpec, num_envs: int, num_slots: int, descriptor: int | None = None
    ) -> None:
        """Creates the file, or opens the file of `descriptor`, made with the same arguments."""
        specs = slot_fields(spec, num_envs)
        stride = slot_size(specs)
        super().__init__(num_slots * stride, descriptor)
        self.slots: list[RolloutArrays] = [
            arrays_at(specs, self.bytes, slot * stride) for slot in range(num_slots)
        ]


def slot_fields(spec: RolloutSpec, num_envs: int) -> dict[str, Any]:
    """Returns a nest of ArraySpec for every field of a slot."""
    num_frames, num_steps = spec.agent.frame_stack, spec.unroll_length

    def frames(stack: ArraySpec) -> ArraySpec:
        frame = frame_spec(stack, num_frames)
        return ArraySpec((num_steps + num_frames, num_envs, *frame.shape), frame.dtype)

    def finals(stack: ArraySpec) -> ArraySpec:
        return ArraySpec((num_steps * num_envs, *stack.shape), stack.dtype)

    space = spec.agent.observation_space
    return {
        **spec.fields(num_envs),
        "observation": map_leaves(frames, space),
        "final_observation": map_leaves(finals, space),
    }


def slot_bytes(spec: RolloutSpec, num_envs: int) -> int:
    """Returns the bytes of a slot, without final observations."""
    return num_bytes({**slot_fields(spec, num_envs), "final_observation": ()})


class SlotWriter:
    """Writes one rollout into a slot, row by row.

    unroll_length: number of steps for which the slot has room.
    """

    def __init__(
        self, slot: RolloutArrays, state: Nest[torch.Tensor], first_env: int, index: int
    ) -> None:
        """Starts a rollout.

        state: recurrent state before row 0. first_env: number of the slot's first environment.
        index: number of the rollout.
        """
        self._slot = slot
        self._num_rows = len(slot["reward"])
        self.unroll_length = self._num_rows - 1
        self._finals = 0
        slot["env_index"][...] = first_env + np.arange(slot["env_index"].shape[1])
        slot["rollout_index"][...] = index
        _write(slot["initial_agent_state"], ..., map_leaves(torch.Tensor.numpy, state))

    def write(self, t: int, row: EnvRow, acted: Acted, version: int) -> None:
        """Writes row t and the action that led to it; row 0 repeats the previous rollout's last."""
        slot = self._slot
        for name in _ENV_FIELDS:
            slot[name][t] = getattr(row, name)
        map_leaves2(partial(self._write_stack, t), slot["observation"], row.observation)
        _write(slot["action"], t, map_leaves(lambda leaf: leaf[0].numpy(), acted.action))
        for name, array in slot["extras"].items():
            array[t] = acted.extras[name][0].numpy()
        slot["policy_version"][t] = version
        for name, array in slot["info"].items():
            write_numbers(array[t], row.final_info, name)
        is_new = t > 0  # the final observations of row 0 are in the previous rollout
        if is_new and row.final_observation is not None:  # ordered by row, then column
            start, self._finals = self._finals, self._finals + int(row.truncated.sum())
            finals = slice(start, self._finals)
            _write(slot["final_observation"], finals, row.final_observation)

    def _write_stack(self, t: int, frames: np.ndarray, stack: np.ndarray) -> None:
        store_row(frames, t, stack, num_frames=1 + len(frames) - self._num_rows)

    def repeat(self, t: int) -> None:
        """Fills the rows after t with row t, because the rollout was cut short there. No episode
        ends in these rows, and the learner ignores the steps to them.
        """
        slot = self._slot
        for name in (*_ENV_FIELDS, "policy_version", "action", "extras", "info"):
            for array in flatten(slot[name]):
                array[t + 1 :] = array[t]
        for name in ("reward", "done", "truncated", "episode_end"):
            slot[name][t + 1 :] = 0
        for frames in flatten(slot["observation"]):
            newest = t + len(frames) - self._num_rows
            frames[newest + 1 :] = frames[newest]

    def written(self) -> RolloutArrays:
        """Returns the slot without its unused room for final observations."""
        used = map_leaves(lambda array: array[: self._finals], self._slot["final_observation"])
        return {**self._slot, "final_observation": used}


_ENV_FIELDS = ("reward", "done", "truncated", "episode_end", "episode_step", "episode_return")


class BatchBuffer:
    """A reusable buffer for one batch, filled column by column, with spare columns behind it.

    num_bytes: of the buffer. missing: number of columns not yet filled.
    """

    def __init__(
        self, spec: RolloutSpec, batch_size: int, pin: bool, spare_columns: int = 0
    ) -> None:
        """Allocates the buffer.

        pin: use pinned memory, for asynchronous copies to a GPU. spare_columns: additional columns
        that somebody else fills.
        """
        fields = spec.fields(batch_size + spare_columns)
        self._tensors = map_leaves(lambda leaf: _empty(leaf, pin), fields)
        self._arrays: RolloutArrays = map_leaves(torch.Tensor.numpy, self._tensors)
        self.num_bytes = sum(leaf.nbytes for leaf in flatten(self._tensors))
        self._size, self._spare = batch_size, spare_columns
        self.missing = batch_size
        self._finals: list[tuple[int, int, list[np.ndarray]]] = []  # column, row, leaves

    def clear(self) -> None:
        """Empties the buffer."""
        self.missing = self._size
        self._finals = []

    def add(self, slot: RolloutArrays, first: int, count: int) -> None:
        """Copies columns first, ..., first + count - 1 of a slot."""
        filled = self._size - self.missing
        here, there = slice(filled, filled + count), slice(first, first + count)
        done = slot["done"][:, there]
        for name, arrays in self._arrays.items():
            for mine, theirs in zip(flatten(arrays), flatten(slot[name]), strict=True):
                if name == "observation" and len(theirs) > len(mine):
                    rebuild_rows(mine[:, here], theirs[:, there], done)
                else:
                    mine[:, here] = theirs[:, there]
        for index, (row, column) in enumerate(np.argwhere(slot["truncated"][1:])):
            if first <= column < first + count:
                leaves = [leaf[index].copy() for leaf in flatten(slot["final_observation"])]
                self._finals.append((filled + int(column) - first, int(row), leaves))
        self.missing -= count

    def rollout(self) -> Rollout:
        """Returns the full batch, which shares the buffer's memory and is valid until `clear`.

        The contents of spare columns are undefined, and final_observation does not include them.
        """
        whole = Rollout(**self._tensors, final_observation=self._final_observation())
        return whole if self._spare else whole.without_resets()

    def _final_observation(self) -> Nest[torch.Tensor]:
        """Returns leaves [K, ...] in the order of Rollout.truncations(): by column, then row."""
        observation: Nest[torch.Tensor] = self._tensors["observation"]
        stacked = [leaf.new_empty((0, *leaf.shape[2:])) for leaf in flatten(observation)]
        if self._finals:
            ordered = [leaves for _, _, leaves in sorted(self._finals, key=lambda final: final[:2])]
            stacked = [torch.from_numpy(np.stack(leaf)) for leaf in zip(*ordered, strict=True)]
        return pack_as(observation, stacked)


def _write(arrays: Any, index: Any, values: Any) -> None:
    """Writes a nest, whose structure an environment of the user may get wrong."""
    map_leaves2(lambda array, value: operator.setitem(array, index, value), arrays, values)


def _empty(spec: ArraySpec, pin: bool) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.empty(spec.shape, dtype=dtype, device="cpu", pin_memory=pin)


def batch_buffers(learner: LearnerInfo, count: int) -> list[BatchBuffer]:
    """Makes `count` buffers for the batches of a learner; raises UsageError without room."""
    rollouts, size, spare = learner.rollouts, learner.batch_size, learner.spare_columns
    pin = learner.device.type == "cuda"
    # Before the allocator fails, whose message names no setting.
    check_buffers(count * rollouts.num_bytes(size + spare), free_memory())
    return [BatchBuffer(rollouts, size, pin, spare) for _ in range(count)]


class Written(NamedTuple):
    """A written rollout of several environments."""

    arrays: RolloutArrays
    num_envs: int
    release: Callable[[], None]  # called by the collector when all columns are copied


class Collector:
    """Fills batches in one thread, for the learner threads.

    num_bytes: of all its batches.

    Closing: `close` ends `collect`, and every iterator as soon as the full batches are taken.
    """

    def __init__(self, batches: Iterable[BatchBuffer]) -> None:
        self.num_bytes = 0
        # A SimpleQueue would lose a batch if Ctrl-C came while `get` waits for the GIL with it.
        self._ready: queue.Queue[tuple[BatchBuffer, Rollout] | None] = queue.Queue()
        self._free: queue.Queue[BatchBuffer | None] = queue.Queue()
        for batch in batches:
            self.num_bytes += batch.num_bytes
            self._free.put(batch)

    def __len__(self) -> int:
        """Number of full batches that wait for a learner thread."""
        return self._ready.qsize()

    def collect(self, rollouts: Iterator[Written]) -> None:
        """Copies the columns of rollouts into batches until the rollouts end or it is closed."""
        rollout, first = None, 0
        while (batch := self._free.get()) is not None:
            while batch.missing:
                if rollout is None:
                    if (rollout := next(rollouts, None)) is None:
                        return
                    first = 0
                count = min(batch.missing, rollout.num_envs - first)
                batch.add(rollout.arrays, first, count)
                first += count
                if first == rollout.num_envs:
                    rollout.release()
                    rollout = None
            self._ready.put((batch, batch.rollout()))

    def batches(self) -> Iterator[Rollout]:
        """Yields batches, each valid until the iterator advances or ends."""
        while (full := self._ready.get()) is not None:
            batch, rollout = full
            try:
                yield rollout
            finally:  # also if the iterator is abandoned
                batch.clear()
                self._free.put(batch)
        self._ready.put(None)  # for the next thread

    def close(self) -> None:
        """Wakes every waiting thread. May be called again."""
        self._ready.put(None)
        self._free.put(None)
