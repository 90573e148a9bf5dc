# SPDX-License-Identifier: Apache-2.0
"""Rewards in units of the running deviation of discounted returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import learners
import numpy as np
import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos import on_policy
from torchbeast.core.algos.config import PPOConfig
from torchbeast.core.algos.on_policy import ReturnNorm
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

GAMMA = 0.9
T = 4
Make = Callable[..., Rollout]


class Stream:
    """One environment: rewards, and where episodes end, at random; row 0 begins one."""

    def __init__(self, seed: int, steps: int = 40) -> None:
        random = np.random.default_rng(seed)
        self.rewards = random.normal(2.0, 3.0, steps + 1)
        self.done = random.random(steps + 1) < 0.2
        self.done[0] = True

    def returns(self, steps: Sequence[int]) -> list[float]:
        """Returns, by the definition, sum over the episode's steps s <= t of gamma^(t-s) r_s."""
        found = []
        for t in steps:
            first = max(s for s in range(t) if self.done[s]) + 1
            found.append(sum(GAMMA ** (t - s) * self.rewards[s] for s in range(first, t + 1)))
        return found


def rollout_of(make: Make, columns: Sequence[tuple[Stream, int, int]], **others: Any) -> Rollout:
    """Returns rollouts: stream, number of the environment, and of its rollout."""
    rows = [slice(T * index, T * (index + 1) + 1) for _, _, index in columns]
    pairs = list(zip([stream for stream, _, _ in columns], rows, strict=True))
    numbers = torch.tensor([[env, index] for _, env, index in columns])
    return make(
        T,
        len(columns),
        reward=_stacked([stream.rewards[each] for stream, each in pairs]).float(),
        done=_stacked([stream.done[each] for stream, each in pairs]),
        env_index=numbers[:, 0].expand(T + 1, -1),
        rollout_index=numbers[:, 1].expand(T + 1, -1),
        **others,
    )


def _stacked(columns: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(columns, 1))


def tiny_net() -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(3), False, hidden=8)


def check_moments(norm: ReturnNorm, returns: list[float]) -> None:
    assert norm.moments().rows.item() == len(returns)
    assert norm.variance.item() == pytest.approx(np.var(returns), rel=1e-5)


def test_the_deviation_is_that_of_the_returns_of_all_steps(make_rollout: Make) -> None:
    norm, streams = ReturnNorm(GAMMA), [Stream(seed) for seed in range(3)]
    for index in (0, 2, 4, 6):  # two rollouts of each environment in a batch, in any order
        columns = [(s, e, index + more) for more in (1, 0) for e, s in enumerate(streams)]
        norm.add(rollout_of(make_rollout, columns))
    check_moments(norm, [g for s in streams for g in s.returns(range(1, 8 * T + 1))])
    rewards = torch.tensor([[1.0, -2.0], [0.0, 1e6]])
    deviation = norm.variance.sqrt().item()
    expected = torch.tensor([[1 / deviation, -2 / deviation], [0.0, 10.0]])
    torch.testing.assert_close(norm(rewards), expected)


def test_environments_that_left_long_ago_are_forgotten_and_the_newest_go_on(
    make_rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_policy, "_MOST_ENVIRONMENTS", 2)
    norm, stays = ReturnNorm(GAMMA), Stream(0)
    leaving = [Stream(seed) for seed in range(1, 6)]
    for index, stream in enumerate(leaving):
        norm.add(rollout_of(make_rollout, [(stays, 0, index), (stream, 1 + index, 0)]))
        assert len(norm._last) <= 2
    expected = stays.returns(range(1, len(leaving) * T + 1))
    check_moments(norm, expected + [g for s in leaving for g in s.returns(range(1, T + 1))])


def test_replayed_columns_and_steps_that_are_not_valid_are_left_out(make_rollout: Make) -> None:
    norm, stream = ReturnNorm(GAMMA), Stream(5)
    old = Stream(6)
    replayed = torch.tensor([False, True]).expand(T + 1, 2)
    mixed = rollout_of(make_rollout, [(stream, 0, 0), (old, 0, 7)], replayed=replayed)
    norm.add(mixed)
    # The second rollout was cut after two steps: its other rows repeat row 2.
    cut = dataclasses.replace(mixed.columns(0, 1), rollout_index=torch.ones(T + 1, 1).long())
    rows = torch.tensor([T, T + 1, T + 2, T + 2, T + 2])
    reward, done = torch.from_numpy(stream.rewards)[rows], torch.from_numpy(stream.done)[rows]
    reward[3:] = done[3:] = 0
    valid = torch.tensor([True, True, True, False, False])[:, None]
    norm.add(
        dataclasses.replace(
            cut, reward=reward[:, None].float(), done=done[:, None], valid=valid, replayed=None
        )
    )
    # The third goes on after row T + 2.
    rest = slice(T + 2, 2 * T + 3)
    reward, done = torch.from_numpy(stream.rewards[rest]), torch.from_numpy(stream.done[rest])
    third = dataclasses.replace(cut, reward=reward[:, None].float(), done=done[:, None])
    third = dataclasses.replace(third, rollout_index=cut.rollout_index + 1, replayed=None)
    norm.add(third)
    check_moments(norm, stream.returns(range(1, 2 * T + 3)))


def test_after_a_gap_returns_begin_with_zero(make_rollout: Make) -> None:
    norm, stream = ReturnNorm(GAMMA), Stream(1)
    stream.done[1:] = False
    norm.add(rollout_of(make_rollout, [(stream, 0, 0)]))
    norm.add(rollout_of(make_rollout, [(stream, 0, 2)]))
    after = Stream(1)
    after.done[1:] = False
    after.done[2 * T] = True  # as if an episode had begun
    check_moments(norm, [*stream.returns(range(1, T + 1)), *after.returns(range(9, 13))])


@pytest.mark.parametrize("make_step", [learners.impala, learners.ppo])
def test_losses_are_those_of_rewards_scaled_by_the_deviation(
    make_step: Any, make_rollout: Make
) -> None:
    columns = [(Stream(1), 0, 0), (Stream(2), 1, 0)]
    rollout = rollout_of(make_rollout, columns, truncated=[(2, 0)])
    settings = {"reward_clipping": "none", "learning_rate": 0.01, "discounting": GAMMA}
    torch.manual_seed(0)
    normal = make_step(tiny_net(), normalise_returns=True, **settings)
    returns = [g for s, _, _ in columns for g in s.returns(range(1, T + 1))]
    torch.manual_seed(0)
    scaled = make_step(tiny_net(), reward_scale=1 / float(np.std(returns)), **settings)
    torch.manual_seed(1)
    metrics = normal.update(rollout).metrics
    torch.manual_seed(1)
    assert metrics == pytest.approx(scaled.update(rollout).metrics, rel=1e-4, abs=1e-6)
    assert normal.algo.models["returns"].moments().rows.item() == 2 * T


def test_clipped_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="normalise_returns scales rewards .* clamps them to"):
        PPOConfig(normalise_returns=True, reward_clipping="abs_one")
    with pytest.raises(ValueError, match="normalise_returns"):
        PPO.create_factory(normalise_returns=True).replaced(reward_clipping="abs_one")
