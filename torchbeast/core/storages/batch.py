# SPDX-License-Identifier: Apache-2.0
"""The interface that all kinds of batch have in common.

A batch consists of columns, each a rollout or transition of one environment, which `split` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchbeast.core.base.nest import Nest, flatten, map_leaves, pack_as

Self = TypeVar("Self", bound="Batch")


class Feedback(NamedTuple):
    """The results of an update that the replay of its batch needs.

    Attributes:
        priorities: [B] new priorities of the transitions, such as the sizes of their TD errors.
        final_state: Leaves [layers, B, hidden], the recurrent state after rows 0..T-1.
    """

    priorities: Tensor | None = None
    final_state: Nest[Tensor] | None = None


NO_FEEDBACK = Feedback()


def joined(parts: Sequence[Feedback], columns: int) -> Feedback:
    """Returns the feedback of a batch: the newest of each column.

    Args:
        parts: The feedback of its columns, in order, once or several times.
        columns: The number of columns.
    """
    if len(parts) == 1:
        return parts[0]
    priorities = [part.priorities for part in parts if part.priorities is not None]
    states = [part.final_state for part in parts if part.final_state is not None]
    state: Nest[Tensor] | None = None
    if states:
        leaves = zip(*map(flatten, states), strict=True)
        state = pack_as(states[0], [_newest(leaf, 1, columns) for leaf in leaves])
    return Feedback(_newest(priorities, 0, columns) if priorities else None, state)


def _newest(parts: Sequence[Tensor], dim: int, columns: int) -> Tensor:
    whole = torch.cat([*parts], dim)
    size = whole.shape[dim]
    if size < columns:
        raise ValueError(
            f"{size} of {columns} columns were learnt from: minibatches() of an algorithm that "
            "learns from such a replay must yield all columns, in their order, as split does"
        )
    return whole.narrow(dim, size - columns, columns).roll(size % columns, dim)


def ignore(feedback: Feedback) -> None:
    """Does nothing with the feedback."""


class Batch(Protocol):
    """The data that one update learns from."""

    @property
    def batch_size(self) -> int:
        """Number of columns."""

    @property
    def column_bytes(self) -> int:
        """Bytes of observations per column."""

    @property
    def num_steps(self) -> int:
        """Number of steps to learn from."""

    @property
    def env_steps(self) -> int:
        """Number of newly collected steps, learnt from or not, which no other batch counts."""

    def new_observations(self) -> Nest[Tensor]:
        """Returns observations [T', B', *shape] to add to running statistics."""

    def lags(self, version: int) -> dict[str, float]:
        """Returns the policy lag behind this version of the weights; {} if unknown."""

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns returns and lengths of the finished games to report for this batch."""

    def finished_info(self) -> dict[str, list[float]]:
        """Returns numbers of the info of these games by keyword, NaN where one gave none."""

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns a batch with function(tensor) in place of every tensor."""

    def hand_back(self, feedback: Feedback, /) -> None:
        """Gives the source what the update returned, before you ask for the next batch."""

    def split(self: Self, max_columns: int) -> Sequence[Self]:
        """Returns slices of at most max_columns and nearly equal size, which share memory."""


def even_ranges(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields starts and ends of ranges of at most `most` that divide `size` evenly."""
    count = -(-size // most)
    return pairwise(size * i // count for i in range(count + 1))


def mapped(function: Callable[[Tensor], Tensor], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Applies the function to every leaf; None stays None."""
    return {
        name: None if nest is None else map_leaves(function, nest) for name, nest in parts.items()
    }
