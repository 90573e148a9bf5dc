# SPDX-License-Identifier: Apache-2.0
"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.base.checks import at_least, require

NEWEST = "model.tar"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of a run's checkpoints."""

    follow: bool = False
    """With --mode test: evaluate every new model.tar while the run trains, append a row for each to
    evaluations.csv, keep the best as evaluation_best.tar, and exit when the run ends. --seed is 0
    by default, so that all checkpoints play from the same starts."""
    checkpoint: str = NEWEST
    """Checkpoint in the run's folder that --mode test plays, for example evaluation_best.tar or
    model.1.tar."""
    num_episodes: int = 10
    """Complete episodes that --mode test plays. More give a less noisy mean."""
    sampled: bool = False
    """In --mode test, sample actions from the policy as in training, instead of acting greedily."""
    random_start: int | None = None
    """Start each episode of --mode test with 0 to this many random actions. Without them, greedy
    play in a deterministic game repeats one episode. Default: 30 in Atari games, else 0."""

    def __post_init__(self) -> None:
        at_least(1, num_episodes=self.num_episodes)
        at_least(0, random_start=self.random_start)
        require(
            not self.follow or self.checkpoint == NEWEST,
            f"--follow plays every new {NEWEST}: leave out --checkpoint {self.checkpoint}",
        )
