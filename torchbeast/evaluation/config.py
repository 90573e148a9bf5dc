# SPDX-License-Identifier: Apache-2.0
"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How whole episodes are played with the checkpoint of a run."""

    num_episodes: int = 10
    """Whole episodes that --mode test plays."""
    sampled: bool = False
    """--mode test plays with actions sampled as in training, not with the most likely ones."""
    random_start: int | None = None
    """--mode test begins each episode with 0 to this many random actions: the most likely ones
    play a deterministic game the same way every time. Default: 30 in Atari games, else 0."""

    def __post_init__(self) -> None:
        at_least(1, num_episodes=self.num_episodes)
        at_least(0, random_start=self.random_start)
