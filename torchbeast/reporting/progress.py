# SPDX-License-Identifier: Apache-2.0
"""The progress of a run, and its means over recent episodes."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_RECENT = 100  # episodes in the means, unless `keep_last` changes it


@dataclass
class Progress:
    """Steps, episodes and recent figures of a run. Written under the training lock."""

    step: int = 0
    episodes: int = 0
    loss: float = float("nan")
    mean_lag: float = float("nan")  # of the last batch
    max_lag: float = float("nan")  # of the last batch
    relevant_share: float = float("nan")  # of the last batch's replayed states
    returns: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT)
    )
    lengths: collections.deque[int] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT)
    )

    def keep_last(self, episodes: int) -> None:
        """Changes the number of episodes in the means."""
        self.returns = collections.deque(self.returns, episodes)
        self.lengths = collections.deque(self.lengths, episodes)

    def mean_return(self) -> float:
        """Returns the mean return of the last episodes; NaN if none has ended."""
        return mean(self.returns)

    def mean_length(self) -> float:
        """Returns the mean length of the last episodes in env steps; NaN if none has ended."""
        return mean(self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain numbers."""
        return {
            "step": self.step,
            "episodes": self.episodes,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; entries missing in a checkpoint start from zero."""
        self.step = state.get("step", 0)
        self.episodes = state.get("episodes", 0)
        self.returns.extend(state.get("returns", ()))
        self.lengths.extend(state.get("lengths", ()))


def mean(values: Iterable[float]) -> float:
    """Returns the mean, NaN of no values; copies them first: the learner thread may add some."""
    recent = list(values)
    return statistics.fmean(recent) if recent else float("nan")
