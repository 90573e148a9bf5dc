# SPDX-License-Identifier: Apache-2.0
"""How far a run is."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_RECENT = 100  # episodes in the mean return that is shown


@dataclass
class Progress:
    """How far a run is. Written under the training lock."""

    step: int = 0
    episodes: int = 0
    loss: float = float("nan")
    mean_lag: float = float("nan")  # of the last batch
    max_lag: float = float("nan")  # likewise
    returns: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT)
    )
    lengths: collections.deque[int] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT)
    )

    def mean_return(self) -> float:
        """Of the last 100 episodes; NaN before the first has ended."""
        return mean(self.returns)

    def mean_length(self) -> float:
        """Likewise, in steps."""
        return mean(self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "step": self.step,
            "episodes": self.episodes,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; what a checkpoint of another program lacks starts anew."""
        self.step = state.get("step", 0)
        self.episodes = state.get("episodes", 0)
        self.returns.extend(state.get("returns", ()))
        self.lengths.extend(state.get("lengths", ()))


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of no values. The learner thread may add some meanwhile."""
    recent = list(values)
    return statistics.fmean(recent) if recent else float("nan")
