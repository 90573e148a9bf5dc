# SPDX-License-Identifier: Apache-2.0
"""Random rollouts for the tests of torchbeast.core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from torchbeast.core.storages.rollout import Rollout

Places = Iterable[tuple[int, int]]  # (row, column)


def random_rollout(
    steps: int = 5,
    batch: int = 3,
    *,
    size: int = 4,
    num_actions: int = 3,
    terminated: Places = (),
    truncated: Places = (),
    state: Any = (),
    **overrides: Any,
) -> Rollout:
    """Observations [T+1, B, size], ends at the given places, everything else random."""
    shape = (steps + 1, batch)
    cut, over = _marks(shape, truncated), _marks(shape, terminated)
    contents: dict[str, Any] = {
        "observation": torch.randn(*shape, size),
        "reward": 2 * torch.randn(shape),
        "done": cut | over,
        "episode_step": torch.randint(100, shape, dtype=torch.int32),
        "episode_return": torch.randn(shape),
        "action": torch.randint(num_actions, shape),
        "extras": {"policy_logits": torch.randn(*shape, num_actions)},
        "initial_agent_state": state,
        "truncated": cut,
        "episode_end": cut | over,
        "policy_version": torch.zeros(shape, dtype=torch.int64),
        "final_observation": torch.randn(int(cut[1:].sum()), size),
        "env_index": torch.arange(batch).expand(shape),
        "rollout_index": torch.zeros(shape, dtype=torch.int64),
    }
    return Rollout(**{**contents, **overrides})


def _marks(shape: tuple[int, int], places: Places) -> torch.Tensor:
    marks = torch.zeros(shape, dtype=torch.bool)
    for row, column in places:
        marks[row, column] = True
    return marks


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test of the core starts from the same random numbers."""
    torch.default_generator.manual_seed(7)  # not torch's function, which looks for GPUs every time


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return random_rollout
