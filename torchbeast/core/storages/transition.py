# SPDX-License-Identifier: Apache-2.0
"""A batch of single steps for off-policy algorithms, such as a sample of a replay.

Entry b of every leaf belongs to transition b: `observation` is what the action was chosen by,
`reward` and `next_observation` are what followed it. Where an episode was truncated,
`next_observation` is its own last observation, and `terminated` is false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from torchbeast.core.nest_py import Nest, flatten, map_leaves
from torchbeast.core.storages.batch import even_bounds


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """A batch of transitions; each is a column."""

    observation: Nest[Tensor]  # leaves [B, *shape], stacks included
    action: Nest[Tensor]  # leaves [B, ...]
    reward: Tensor  # float32 [B], raw
    terminated: Tensor  # bool [B]: nothing follows, so there is nothing to bootstrap from
    next_observation: Nest[Tensor]  # leaves [B, *shape]
    extras: dict[str, Tensor] = field(default_factory=dict)  # [B, ...] of acting, and weights
    env_steps: int  # collected since the batch before, whether they are in this one or not
    episodes: tuple[
        tuple[float, int], ...
    ] = ()  # returns and lengths of those that ended meanwhile

    @property
    def batch_size(self) -> int:
        """B."""
        return self.reward.shape[0]

    @property
    def num_steps(self) -> int:
        """B: the steps to learn from."""
        return self.batch_size

    @property
    def column_bytes(self) -> int:
        """Bytes of observations in a transition."""
        leaves = flatten(self.observation) + flatten(self.next_observation)
        return sum(leaf[0].nbytes for leaf in leaves)

    def new_observations(self) -> Nest[Tensor]:
        """Leaves [1, B, *shape]: what is sampled again counts again, as often as it is learnt."""
        observation: Nest[Tensor] = map_leaves(lambda leaf: leaf.unsqueeze(0), self.observation)
        return observation

    def lags(self, version: int) -> dict[str, float]:
        """Returns {}: off-policy algorithms do not depend on the age of the weights that acted."""
        return {}

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of games that ended in the collected steps."""
        return [value for value, _ in self.episodes], [length for _, length in self.episodes]

    def map(self, function: Callable[[Tensor], Tensor]) -> Transitions:
        """Returns transitions with function(tensor) in place of every tensor."""
        return replace(self, **self._mapped(function))

    def hand_back(self, original: Transitions) -> None:
        """Does nothing: learning writes nothing into transitions."""

    def split(self, max_columns: int) -> list[Transitions]:
        """Returns the same transitions in nearly equal batches of at most max_columns, which share
        memory. The first has all of env_steps and episodes.
        """
        if max_columns >= self.batch_size:
            return [self]
        bounds = even_bounds(self.batch_size, -(-self.batch_size // max_columns))
        return [self._columns(start, end) for start, end in pairwise(bounds)]

    def _columns(self, start: int, end: int) -> Transitions:
        part = replace(self, **self._mapped(lambda leaf: leaf[start:end]))
        return part if start == 0 else replace(part, env_steps=0, episodes=())

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        names = [f.name for f in fields(self) if f.name not in ("env_steps", "episodes")]
        return {name: map_leaves(function, getattr(self, name)) for name in names}
