# SPDX-License-Identifier: Apache-2.0
"""What every kind of batch can say of itself, whatever it holds.

A batch has columns, which `split` shares out: rollouts or transitions, one of an environment each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from torchbeast.core.nest_py import Nest

Self = TypeVar("Self", bound="Batch")


class Batch(Protocol):
    """What one update learns from."""

    @property
    def batch_size(self) -> int:
        """Columns."""

    @property
    def column_bytes(self) -> int:
        """Bytes of observations in a column."""

    @property
    def num_steps(self) -> int:
        """Steps to learn from."""

    @property
    def env_steps(self) -> int:
        """Steps that were collected for this batch: none of them counts in another one."""

    def new_observations(self) -> Nest[Tensor]:
        """Observations [T', B', *shape] that running statistics are to count."""

    def lags(self, version: int) -> dict[str, float]:
        """How far the weights that acted were behind those of this version; {} where it is not
        known.
        """

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns and lengths of the games that ended in the steps that were collected."""

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """A batch of what the function makes of each tensor."""

    def split(self: Self, max_columns: int) -> Sequence[Self]:
        """The same columns, at most so many at a time, shared out evenly. Shares memory."""


def even_bounds(size: int, parts: int) -> list[int]:
    """Where `parts` parts of `size` begin, and `size`; no two differ by more than one."""
    return [size * i // parts for i in range(parts + 1)]
