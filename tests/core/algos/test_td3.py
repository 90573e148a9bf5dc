# SPDX-License-Identifier: Apache-2.0
"""TD3, with numbers computed by the paper's algorithm 1."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_sac import CRITICS, GAMMA, TARGETS, WIDTH, LinearCritics, q, transitions
from torch import Tensor, nn

from torchbeast.core.actors.distributions import SquashedGaussian
from torchbeast.core.actors.off_policy import DeterministicActorCritic
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.config import StepConfig, TD3Config
from torchbeast.core.algos.td3 import TD3
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.update.optimiser_step import OptimiserStep

W, TARGET_W = 0.5, 0.1


class LinearPolicy(DeterministicActorCritic):
    def __init__(self) -> None:
        super().__init__()
        self.distribution = SquashedGaussian(Box(-WIDTH, WIDTH, (1,)))
        self.w = nn.Parameter(torch.tensor(W))

    def forward(self, observation: Any) -> Tensor:
        return (self.w * observation).unsqueeze(-1)

    def make_critics(self) -> LinearCritics:
        return LinearCritics(CRITICS)


def algo_of(**settings: Any) -> TD3:
    config = TD3Config(discounting=GAMMA, reward_clipping="none", **settings)
    algo = TD3(LinearPolicy(), config)
    with torch.no_grad():
        algo.target.network.weights.copy_(torch.tensor(TARGETS))  # type: ignore[operator]
        algo.target_actor.network.w.fill_(TARGET_W)  # type: ignore[operator]
    return algo


@pytest.mark.parametrize(("drawn", "added"), [(1.0, 0.2), (-7.0, -0.5)])
def test_targets_have_clipped_noise_and_the_smaller_value(
    drawn: float, added: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn_like", lambda leaf: torch.full_like(leaf, drawn))
    losses = algo_of().losses(transitions(weights=torch.ones(2)))
    loss, priorities = losses.terms["critic_loss"], losses.feedback.priorities
    after = math.tanh(TARGET_W * 3.0) + added
    y = [0.5 + GAMMA * min(q(TARGETS, 3.0, after)), 1.0]
    values = [q(CRITICS, 1.0, 1.0 / WIDTH), q(CRITICS, -2.0, -0.5 / WIDTH)]
    errors = [[value - y[b] for value in values[b]] for b in range(2)]
    squares = [0.5 * sum(error**2 for error in pair) for pair in errors]
    assert loss.item() == pytest.approx(sum(squares) / 2, rel=1e-5)
    assert any(first * second < 0 for first, second in errors), "nothing would cancel"
    sizes = [(abs(first) + abs(second)) / 2 for first, second in errors]
    assert priorities is not None
    assert priorities.tolist() == pytest.approx(sizes, rel=1e-5)


def test_noisy_target_actions_stay_in_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    algo = algo_of(target_noise=5.0, target_noise_clip=5.0)
    loss = algo.losses(transitions()).terms["critic_loss"]
    y = [0.5 + GAMMA * min(q(TARGETS, 3.0, 1.0)), 1.0]
    values = [q(CRITICS, 1.0, 1.0 / WIDTH), q(CRITICS, -2.0, -0.5 / WIDTH)]
    squares = [sum(0.5 * (value - y[b]) ** 2 for value in values[b]) for b in range(2)]
    assert loss.item() == pytest.approx(sum(squares) / 2, rel=1e-5)


def test_policy_and_targets_move_every_second_step_only() -> None:
    algo = algo_of(target_rate=0.5)
    step = OptimiserStep(algo, StepConfig(), total_steps=100)
    policies, targets = [algo.actor.w.item()], [torch.tensor(TARGET_W).item()]
    for _ in range(4):
        before = algo.critics.weights.clone()  # type: ignore[operator,union-attr]
        step.update(transitions())
        assert not torch.equal(before, algo.critics.weights)
        policies.append(algo.actor.w.item())
        targets.append(algo.target_actor.network.w.item())  # type: ignore[operator,union-attr]
    moved = [old != new for old, new in pairwise(policies)]
    followed = [old != new for old, new in pairwise(targets)]
    assert moved == followed == [False, True, False, True]
    assert targets[2] == pytest.approx((TARGET_W + policies[2]) / 2)


def test_the_policy_is_learnt_by_the_first_critic() -> None:
    algo = algo_of(policy_period=1)
    loss = algo.losses(transitions()).terms["actor_loss"]
    expected = -sum(q(CRITICS, s, math.tanh(W * s))[0] for s in (1.0, -2.0)) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    slope = sum(2.0 * s * (1 - math.tanh(W * s) ** 2) for s in (1.0, -2.0)) / 2
    assert algo.actor.w.grad is not None
    assert algo.actor.w.grad.item() == pytest.approx(-slope, rel=1e-4)


def test_exploring_adds_noise_in_units_of_the_box() -> None:
    algo = algo_of(exploration_noise=0.1)
    algo.actor.noise.fill_(0.5)  # of a checkpoint
    OptimiserStep(algo, StepConfig(), total_steps=100)
    algo.actor.epsilon.zero_()
    u = torch.zeros(20_000, 1)
    assert algo.actor.choose_each(u, "greedy").action.eq(0).all()
    explored = algo.actor.choose_each(u, "explore").action
    assert explored.std().item() == pytest.approx(0.1 * WIDTH, rel=0.03)
    algo.actor.epsilon.fill_(1.0)
    spread = algo.actor.choose_each(u, "explore").action
    assert spread.std().item() == pytest.approx(2 * WIDTH / math.sqrt(12), rel=0.03)


def test_a_space_of_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="TD3Net needs a Box action space, got Discrete: use dqn"):
        make_model(ActorSpec("td3-mlp"), ArraySpec((4,), "float32"), Discrete(2))


def test_the_built_in_network_is_checked_and_made() -> None:
    actor = make_model(ActorSpec("td3-mlp"), ArraySpec((4,), "float32"), Box(-1.0, 3.0, (2,)))
    algo = TD3(actor, TD3Config(reward_clipping="none"))
    assert algo.critics(torch.zeros(5, 4), torch.zeros(5, 2)).shape == (2, 5)
