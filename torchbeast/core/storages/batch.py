# SPDX-License-Identifier: Apache-2.0
"""The interface that all kinds of batch have in common.

A batch consists of columns, each a rollout or transition of one environment, which `split` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from torchbeast.core.nest_py import Nest

Self = TypeVar("Self", bound="Batch")


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

    def hand_back(self: Self, original: Self) -> None:
        """Copies what learning wrote into this batch to the one that it was mapped from."""

    def split(self: Self, max_columns: int) -> Sequence[Self]:
        """Returns slices of at most max_columns and nearly equal size, which share memory."""


def even_bounds(size: int, count: int) -> list[int]:
    """Returns the starts of `count` ranges that divide `size` evenly, and `size`."""
    return [size * i // count for i in range(count + 1)]
