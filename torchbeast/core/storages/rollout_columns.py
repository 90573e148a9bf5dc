# SPDX-License-Identifier: Apache-2.0
"""The columns of a batch as a replay takes them: checked, one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.nest_py import flatten
from torchbeast.core.storages.frame_stacks import continue_stacks, repeat_a_frame

# Row 0 repeats these from the rollout before. The outputs of acting may differ: a rollout notes the
# version it begins with.
_REPEATED = ("reward", "done", "truncated", "episode_end", "episode_step", "episode_return")


class RolloutColumn(NamedTuple):
    """One rollout."""

    env_index: int
    rollout: int  # rollout_index
    repeated: dict[str, np.ndarray]  # [T+1], by field: what row 0 repeats, but the observation
    others: list[np.ndarray]  # leaves [T+1, *shape] of all fields that are stored, but the same
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
        done, rows_before = self.repeated["done"], np.flatnonzero(self.repeated["truncated"][1:])
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
    observation. Raises ValueError when final observations are missing.
    """
    leaves = flatten({name: arrays[name] for name in others})
    stacks, finals = flatten(arrays["observation"]), flatten(arrays["final_observation"])
    counts = arrays["truncated"][1:].sum(axis=0)
    ends = counts.cumsum()
    _check_finals(finals, len(stacks), int(counts.sum()))
    for column in range(*columns.indices(len(counts))):
        own = slice(int(ends[column] - counts[column]), int(ends[column]))
        yield RolloutColumn(
            env_index=int(arrays["env_index"][0, column]),
            rollout=int(arrays["rollout_index"][0, column]),
            repeated={name: arrays[name][:, column] for name in _REPEATED},
            others=[leaf[:, column] for leaf in leaves],
            stacks=[leaf[:, column] for leaf in stacks],
            finals=[leaf[own] for leaf in finals] if counts[column] else [],
        )


def _check_finals(finals: list[np.ndarray], leaves: int, count: int) -> None:
    given = [len(leaf) for leaf in finals]
    require(
        not count or given == [count] * leaves,
        f"{count} truncations need as many final observations in each of {leaves} leaves, "
        f"got {given}",
    )
