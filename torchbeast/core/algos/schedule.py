# SPDX-License-Identifier: Apache-2.0
"""Learning rates over a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class HasLearningRate(Protocol):
    """Any optimiser of torch's form."""

    param_groups: list[dict[str, Any]]


class LinearDecay:
    """Learning rates that go linearly to 0 over total_steps, and stay there.

    Over the first warmup_steps they also grow linearly from 0. Both are env steps.
    """

    def __init__(
        self, optimisers: Iterable[HasLearningRate], total_steps: int, warmup_steps: int = 0
    ) -> None:
        self._optimisers = list(optimisers)
        self._initial = [float(group["lr"]) for group in self._groups()]
        self._total_steps = total_steps
        self._warmup_steps = warmup_steps
        self.set(0)

    def set(self, env_steps: int) -> None:
        """Sets the learning rates of an update that begins after so many env steps."""
        remaining = max(0.0, 1.0 - env_steps / self._total_steps)
        warmth = min(1.0, env_steps / self._warmup_steps) if self._warmup_steps else 1.0
        for group, initial in zip(self._groups(), self._initial, strict=True):
            group["lr"] = initial * remaining * warmth

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the present groups, which loading a state replaces in a torch.optim optimiser."""
        return [group for optimiser in self._optimisers for group in optimiser.param_groups]
