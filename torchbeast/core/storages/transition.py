# SPDX-License-Identifier: Apache-2.0
"""A batch of transitions for off-policy algorithms, such as a sample of a replay.

Entry b of every leaf belongs to transition b: `observation` is what the action was chosen by,
`reward` and `next_observation` are what followed it. Where an episode was truncated,
`next_observation` is its own last observation, and `terminated` is false.

A transition is one step, or with n-step returns up to n: fewer where the episode ended, or nothing
newer was known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from torchbeast.core.base.nest import Nest, flatten, map_leaves
from torchbeast.core.storages.batch import Feedback, even_ranges, ignore

_OF_COLLECTING = {"env_steps", "episodes", "info", "collected_by", "give_feedback"}


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """A batch of B transitions, for off-policy algorithms; each transition is a column.

    Attributes:
        observation: Leaves [B, *shape], with frames stacked: what the action was chosen by.
        action: Leaves [B, ...].
        reward: float32 [B], the unscaled reward of the first step.
        terminated: bool [B], whether the episode ended, so that no value is bootstrapped.
        next_observation: Leaves [B, *shape].
        later_rewards: float32 [B, n-1], unscaled rewards of the steps after the first, 0 behind the
            last. None: every transition is one step.
        num_joined: int64 [B], steps in each transition. None: one.
        weights: float32 [B], importance-sampling weights of the losses. The replay then needs new
            priorities as Feedback. None: all 1.
        extras: Outputs of acting by name, [B, ...].
        policy_version: int64 [B], version of the weights that acted. None: unknown.
        env_steps: Steps collected since the batch before, whether they are in this one or not.
        episodes: Returns and lengths of the games that ended meanwhile.
        info: Numbers in the info of these games, by keyword.
        collected_by: Mean and oldest version of the weights that acted meanwhile. None: nothing was
            collected.
        give_feedback: Takes the Feedback of the update.
    """

    observation: Nest[Tensor]
    action: Nest[Tensor]
    reward: Tensor
    terminated: Tensor
    next_observation: Nest[Tensor]
    later_rewards: Tensor | None = None
    num_joined: Tensor | None = None
    weights: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    policy_version: Tensor | None = None
    env_steps: int
    episodes: tuple[tuple[float, int], ...] = ()
    info: Mapping[str, Sequence[float]] = field(default_factory=dict)
    collected_by: tuple[float, int] | None = None
    give_feedback: Callable[[Feedback], None] = ignore

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
        """Returns observations as leaves [1, B, *shape]; what is sampled again counts again."""
        return map_leaves(lambda leaf: leaf.unsqueeze(0), self.observation)

    def lags(self, version: int) -> dict[str, float]:
        """Returns the policy lag in versions.

        Args:
            version: The present version of the weights.

        Returns:
            mean_lag and max_lag of the steps that were collected, and replay_age, the mean lag of
            the transitions in the batch; each only if it is known.
        """
        lags = {}
        if self.collected_by is not None:
            mean, oldest = self.collected_by
            lags = {"mean_lag": version - mean, "max_lag": float(version - oldest)}
        if self.policy_version is not None:
            lags["replay_age"] = version - self.policy_version.double().mean().item()
        return lags

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of games that ended in the collected steps."""
        return [value for value, _ in self.episodes], [length for _, length in self.episodes]

    def finished_info(self) -> dict[str, list[float]]:
        """Returns the numbers of these games by keyword, NaN where one gave none."""
        return {name: list(numbers) for name, numbers in self.info.items()}

    def map(self, function: Callable[[Tensor], Tensor]) -> Transitions:
        """Returns transitions with function(tensor) in place of every tensor."""
        names = {field.name for field in fields(self)} - _OF_COLLECTING
        nests = {name: nest for name in names if (nest := getattr(self, name)) is not None}
        return replace(self, **map_leaves(function, nests))

    def split(self, max_columns: int) -> list[Transitions]:
        """Returns the same transitions in batches of nearly equal size, which share memory.

        The first has all of env_steps and episodes.

        Args:
            max_columns: The most transitions of a batch.
        """
        if max_columns >= self.batch_size:
            return [self]
        ranges = even_ranges(self.batch_size, max_columns)
        return [self._columns(start, end) for start, end in ranges]

    def _columns(self, start: int, end: int) -> Transitions:
        part = self.map(lambda leaf: leaf[start:end])
        if start == 0:
            return part
        return replace(part, env_steps=0, episodes=(), info={}, collected_by=None)
