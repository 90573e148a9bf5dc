# SPDX-License-Identifier: Apache-2.0
"""What IMPALA, LASER, PPO and PQN have in common: how they treat rewards, and minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Actor, ActorCritic
from torchbeast.core.actors.running_norm import LIMIT, SMALLEST_VARIANCE, RunningNorm
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import IMPALAConfig, RewardConfig
from torchbeast.core.algos.popart import PopArt, Unscaled
from torchbeast.core.base.nest import flatten
from torchbeast.core.losses import clip_rewards
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError

_MOST_ENVIRONMENTS = 100_000  # whose returns go on; others have left the run


class ReturnNorm(RunningNorm):
    """Divides rewards by the deviation of their discounted returns (Engstrom et al. 2020, arXiv
    2005.12729, algorithm 1).

        G_t = r_t + discounting * (1 - done_{t-1}) * G_{t-1}        for each environment
        r_t -> r_t / sqrt(var G), clipped to [-LIMIT, LIMIT]

    The variance covers every G so far. Nothing is subtracted from a reward: that would change
    what is worth doing. Each batch is counted once, in order. A rollout that does not follow the
    one that was counted last of its environment begins with a return of 0.
    """

    def __init__(self, discounting: float) -> None:
        super().__init__(())
        self._discounting = discounting
        # By environment. Not saved: another part of the run begins new episodes.
        self._last: dict[int, tuple[int, float]] = {}  # index of the newest rollout, and its G

    def forward(self, rewards: Tensor) -> Tensor:
        """Returns rewards of any shape in units of the deviation, float32."""
        deviation = self.variance.clamp(min=SMALLEST_VARIANCE).sqrt()
        return (rewards / deviation).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def add(self, rollout: Rollout) -> None:
        """Adds the returns of the steps that are new and learnt from."""
        from_zero, shares = self._from_zero(rollout)
        before = self._before(rollout, from_zero[-1], shares[-1])
        new = chosen(from_zero + shares * before, rollout.online_mask)
        if len(new):
            self.observe(new)

    def _from_zero(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Returns G [T, B] of the steps if it was 0 before them, and the share of the true one
        before them that is to be added. Steps that are not valid leave both as they are.
        """
        goes_on = self._discounting * (1.0 - rollout.done.double())
        value, share = torch.zeros_like(goes_on[0]), torch.ones_like(goes_on[0])
        mask = rollout.mask
        values, shares = [], []
        for t in range(rollout.unroll_length):
            new, left = rollout.reward[t + 1] + goes_on[t] * value, goes_on[t] * share
            value = new if mask is None else torch.where(mask[t], new, value)
            share = left if mask is None else torch.where(mask[t], left, share)
            values.append(value)
            shares.append(share)
        return torch.stack(values), torch.stack(shares)

    def _before(self, rollout: Rollout, from_zero: Tensor, shares: Tensor) -> Tensor:
        """Returns G [B] before the first step, and notes those after the last of online columns;
        from_zero, shares: of the last step, [B].
        """
        numbers = zip(rollout.env_index[0].tolist(), rollout.rollout_index[0].tolist(), strict=True)
        values, kept = from_zero.tolist(), shares.tolist()
        before = [0.0] * len(values)
        replayed = [False] * len(values)
        if rollout.replayed is not None:
            replayed = rollout.replayed[0].tolist()
        # An environment may have several rollouts in a batch.
        for rollout_index, env, column in sorted((n, e, c) for c, (e, n) in enumerate(numbers)):
            if replayed[column]:
                continue
            last, value = self._last.pop(env, (rollout_index, 0.0))
            if last + 1 == rollout_index:
                before[column] = value
            after = values[column] + kept[column] * before[column]
            self._last[env] = rollout_index, after  # at the end: the newest
        while len(self._last) > _MOST_ENVIRONMENTS:
            del self._last[next(iter(self._last))]
        return torch.tensor(before, dtype=from_zero.dtype, device=from_zero.device)


class OnPolicy(Algorithm[Rollout]):
    """Base class of algorithms that train on rollouts: an optimiser, and rewards with their
    discounts.

    Subclasses define `losses`. The Config is IMPALA's, or extends it.

    Args:
        actor: An ActorCritic.
        config: The hyperparameters.
    """

    Config = IMPALAConfig
    actor: ActorCritic
    config: IMPALAConfig

    def __init__(self, actor: Actor, config: IMPALAConfig) -> None:
        super().__init__(actor, config)
        self.optimisers = {"actor": config.optimiser.make(actor.parameters())}
        self._returns: ReturnNorm | None = None
        if config.normalise_returns:
            device = next(actor.parameters()).device
            self._returns = ReturnNorm(config.discounting).to(device)
            self.models["returns"] = self._returns
        self.scale = Unscaled()  # of the network's values
        if config.popart:
            self.scale = self.models["popart"] = PopArt(self.actor, config.popart_rate)

    def observe(self, batch: Rollout) -> None:
        """Adds the batch to the running statistics of observations and of returns."""
        super().observe(batch)
        if self._returns is not None:
            self._returns.add(batch)

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Moves the statistics of PopArt."""
        self.scale.adapt(metrics)

    def rewards_and_discounts(
        self, rollout: Rollout, final_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns rewards and discounts as the functions of `returns` and `vtrace` expect them.

        The recursions only ever see r + gamma * V and stop where the discount is 0, so adding the
        value of a final observation to the reward is exact.

        Args:
            rollout: Rollouts of T steps in B columns.
            final_values: [T, B] values of final observations where an episode was truncated,
                else 0.

        Returns:
            Rewards [T, B], scaled and clipped, and with the discounted value of the final
            observation where an episode was truncated; and discounts [T, B], 0 where an episode
            ended.
        """
        inputs = rewards_and_discounts(self.config, rollout, final_values, self._returns)
        return inputs["rewards"], inputs["discounts"]


def rewards_and_discounts(
    config: RewardConfig, rollout: Rollout, final_values: Tensor, norm: ReturnNorm | None = None
) -> dict[str, Tensor]:
    """Returns OnPolicy.rewards_and_discounts as keyword arguments of the functions of `returns`.

    Args:
        config: How rewards are scaled, clipped and discounted.
        rollout: Rollouts of T steps in B columns.
        final_values: [T, B], as in OnPolicy.rewards_and_discounts.
        norm: Applied to the rewards first.
    """
    rewards = rollout.reward[1:] if norm is None else norm(rollout.reward[1:])
    rewards = clip_rewards(config.reward_scale * rewards, config.reward_clipping)
    discounts = config.discounting * (1.0 - rollout.done[1:].float())
    return {"rewards": rewards + config.discounting * final_values, "discounts": discounts}


def chosen(values: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the values [T, B] where the mask is true, in one dimension; None: all."""
    return values.flatten() if mask is None else values[mask]


def shuffled(batch: Rollout, parts: int) -> Iterator[Rollout]:
    """Yields parts of a batch in random order: single steps, or with a recurrent network whole
    columns.

    Args:
        batch: Rollouts of T steps in B columns.
        parts: Number of minibatches.

    Raises:
        UsageError: If a part would be empty.
    """
    count, take, what = batch.unroll_length * batch.batch_size, batch.take_steps, "steps"
    if flatten(batch.initial_agent_state):
        count, take, what = batch.batch_size, batch.take, "rollouts"
    if count < parts:
        raise UsageError(
            f"num_mini_batch {parts} is more than the {count} {what} of a batch: use at most "
            f"{count}, or a larger batch_size"
        )
    order = torch.randperm(count).to(batch.reward.device)
    yield from (take(which) for which in order.tensor_split(parts))
