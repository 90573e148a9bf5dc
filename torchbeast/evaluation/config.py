# SPDX-License-Identifier: Apache-2.0
"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.base.checks import at_least, require

NEWEST = "model.tar"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of the checkpoints of a run."""

    follow: bool = False
    """With --mode test: evaluate every new model.tar of the run while it trains, append a row to
    evaluations.csv for each, keep the best as evaluation_best.tar, and end with the run. --seed is
    0 by default, so that all of them play the same starts."""
    checkpoint: str = NEWEST
    """The file in the run's folder that --mode test plays, such as evaluation_best.tar or
    model.1.tar."""
    num_episodes: int = 10
    """Number of whole episodes that --mode test plays."""
    sampled: bool = False
    """Use sampled actions in --mode test, as in training, instead of the most likely ones."""
    random_start: int | None = None
    """Start each episode of --mode test with 0 to this many random actions, because the most likely
    actions repeat a deterministic game. Default: 30 in Atari games, else 0."""

    def __post_init__(self) -> None:
        at_least(1, num_episodes=self.num_episodes)
        at_least(0, random_start=self.random_start)
        require(
            not self.follow or self.checkpoint == NEWEST,
            f"--follow plays every new {NEWEST}: leave out --checkpoint {self.checkpoint}",
        )
