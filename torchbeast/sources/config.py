# SPDX-License-Identifier: Apache-2.0
"""Settings common to all sources."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The batch of an update."""

    batch_size: int = 8
    """Number of rollouts in one update."""
    unroll_length: int = 80
    """Steps in one rollout. Longer rollouts give fewer, larger updates and older data."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, unroll_length=self.unroll_length)


@dataclass(frozen=True, kw_only=True)
class ActorsConfig:
    """Environments of a run that starts them itself."""

    num_actors: int = 4
    """Number of environments in all. Each costs memory; more make larger inference batches."""

    def __post_init__(self) -> None:
        at_least(1, num_actors=self.num_actors)
