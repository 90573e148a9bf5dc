# SPDX-License-Identifier: Apache-2.0
"""A round of gradient workers, as the batch of an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchbeast.core.envs.contract import joined_info
from torchbeast.core.storages.batch import Feedback
from torchbeast.schemes.gradients.worker import Collected


@dataclasses.dataclass(kw_only=True)
class Round:
    """The batches of an update, which the workers keep.

    answers: in an asynchronous round the first one that has arrived; its batch, and which others
    are finished in it, is only known after the update.
    """

    collected: list[Collected] = dataclasses.field(default_factory=list)
    answers: list[tuple[int, Any]] = dataclasses.field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """Number of workers that have collected."""
        return len(self.collected)

    @property
    def column_bytes(self) -> int:
        """0: the batches are elsewhere."""
        return 0

    @property
    def num_steps(self) -> int:
        """Number of collected steps."""
        return self.env_steps

    @property
    def env_steps(self) -> int:
        """Number of collected steps of all workers."""
        return sum(each.env_steps for each in self.collected)

    def new_observations(self) -> tuple[()]:
        """Returns no observations: the workers have them."""
        return ()

    def lags(self, version: int) -> dict[str, float]:
        """Returns the lags behind this version: the mean over all steps, and the largest."""
        found = [(each, version - each.version) for each in self.collected if each.lags]
        if not found:
            return {}
        steps = sum(each.env_steps for each, _ in found)
        total = sum(each.env_steps * (each.lags["mean_lag"] + more) for each, more in found)
        largest = max(each.lags["max_lag"] + more for each, more in found)
        return {"mean_lag": total / max(1, steps), "max_lag": largest}

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of all workers' finished games."""
        returns = [r for each in self.collected for r in each.episodes[0]]
        return returns, [n for each in self.collected for n in each.episodes[1]]

    def finished_info(self) -> dict[str, list[float]]:
        """Returns the numbers of the info of these games, by keyword."""
        return joined_info([each.info for each in self.collected])

    def map(self, function: Callable[[Tensor], Tensor]) -> Round:
        """Returns the round: it has no tensors."""
        return self

    def hand_back(self, feedback: Feedback) -> None:
        """Does nothing: gradient workers have no replay."""

    def split(self, max_columns: int) -> Sequence[Round]:
        """Returns the round, which cannot be divided."""
        return [self]
