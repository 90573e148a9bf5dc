# SPDX-License-Identifier: Apache-2.0
"""The interface that all kinds of batch have in common.

A batch consists of columns, each a rollout or transition of one environment, which `split` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from torchbeast.core.base.nest import Nest

Self = TypeVar("Self", bound="Batch")


class Feedback(NamedTuple):
    """The results of an update that the replay of its batch needs.

    Attributes:
        priorities: [B] new priorities of the columns, such as the sizes of their TD errors.
        final_state: Leaves [layers, B, hidden], the recurrent state after rows 0..T-1.
    """

    priorities: Tensor | None = None
    final_state: Nest[Tensor] | None = None


NO_FEEDBACK = Feedback()


def ignore(feedback: Feedback) -> None:
    """Does nothing with the feedback; a function of a module, so that batches can be pickled."""


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

    def give_feedback(self, feedback: Feedback, /) -> None:
        """Gives the source what the update returned, before you ask for the next batch."""

    def split(self: Self, max_columns: int) -> Sequence[Self]:
        """Returns slices of at most max_columns and nearly equal size, which share memory."""


def even_ranges(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields starts and ends of ranges of at most `most` that divide `size` evenly."""
    count = -(-size // most)
    return pairwise(size * i // count for i in range(count + 1))
