# SPDX-License-Identifier: Apache-2.0
"""What IMPALA, LASER and PPO have in common: one optimiser, and how rewards are learnt from."""

from __future__ import annotations

from torch import Tensor

from torchbeast.core.actors.contract import Actor, ActorCritic
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import ImpalaConfig
from torchbeast.core.algos.return_norm import ReturnNorm
from torchbeast.core.losses import clip_rewards
from torchbeast.core.storages.rollout import Rollout


class OnPolicy(Algorithm[Rollout]):
    """The common base of the built-in algorithms that learn from rollouts."""

    Config = ImpalaConfig
    actor: ActorCritic
    config: ImpalaConfig

    def __init__(self, actor: Actor, config: ImpalaConfig) -> None:
        super().__init__(actor, config)
        self.optimisers = {"actor": config.optimiser.make(actor.parameters())}
        self._returns: ReturnNorm | None = None
        if config.normalise_returns:
            device = next(actor.parameters()).device
            self._returns = ReturnNorm(config.discounting).to(device)
            self.models["returns"] = self._returns

    def observe(self, batch: Rollout) -> None:
        """Counts the batch in the running statistics of observations and of returns."""
        super().observe(batch)
        if self._returns is not None:
            self._returns.add(batch)

    def rewards_and_discounts(
        self, rollout: Rollout, final_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns rewards and discounts [T, B] as `returns` and `vtrace` expect them.

        final_values: [T, B] values of final observations where truncated, else 0.

        The discount is 0 where an episode ended, and the reward of a truncated one includes the
        discounted value of its final observation. This is exact: the recursion only ever sees
        r + gamma * V, and stops where the discount is 0.
        """
        config, rewards = self.config, rollout.reward[1:]
        if self._returns is not None:
            rewards = self._returns(rewards)
        rewards = clip_rewards(config.reward_scale * rewards, config.reward_clipping)
        discounts = config.discounting * (1.0 - rollout.done[1:].float())
        return rewards + config.discounting * final_values, discounts
