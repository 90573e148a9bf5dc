# SPDX-License-Identifier: Apache-2.0
"""Double DQN, with numbers computed by hand. States are 0, 1, 2; the network is a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.actors.off_policy import QNetwork
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.config import DQNConfig, OptimiserConfig, StepConfig
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.algos.off_policy import Target
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError

LEARNT = [[1.0, 2.0], [3.0, 0.0], [5.0, 4.0]]
TARGET = [[0.0, 0.0], [10.0, 20.0], [7.0, 8.0]]


class Table(QNetwork):
    separable = True

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(2))
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, observation: Any) -> Tensor:
        return self.values[observation]


def made(huber_delta: float | None = 1.0, **settings: Any) -> DQN:
    settings |= {"discounting": 0.9, "reward_clipping": "none"}
    config = DQNConfig(huber_delta=huber_delta, **settings)
    algo = DQN(Table(LEARNT), config)
    with torch.no_grad():
        algo.target.network.values.copy_(torch.tensor(TARGET))
    return algo


def transitions(**more: Any) -> Transitions:
    """One step from 0; one that terminates in 1; two steps from 2."""
    return Transitions(
        observation=torch.tensor([0, 1, 2]),
        action=torch.tensor([1, 0, 0]),
        reward=torch.tensor([0.5, 1.0, 1.0]),
        terminated=torch.tensor([False, True, False]),
        next_observation=torch.tensor([1, 1, 2]),
        later_rewards=torch.tensor([[0.0], [0.0], [2.0]]),
        num_joined=torch.tensor([1, 1, 2]),
        env_steps=4,
        **more,
    )


# y = 0.5 + 0.9 * 10: the learnt values prefer action 0 in state 1, which the target rates 10
# y = 1, and y = 1 + 0.9 * 2 + 0.81 * 7
TARGETS = [9.5, 1.0, 8.47]
ERRORS = [9.5 - 2.0, 1.0 - 3.0, 8.47 - 5.0]
HUBER = [abs(error) - 0.5 for error in ERRORS]


def test_the_learnt_network_chooses_and_the_target_network_rates() -> None:
    losses = made().losses(transitions())
    assert losses.terms["value_loss"].item() == pytest.approx(sum(HUBER) / 3)
    assert losses.metrics["mean_value"].item() == pytest.approx((2 + 3 + 5) / 3)  # type: ignore[union-attr]


def test_without_double_dqn_the_target_network_does_both() -> None:
    errors = [0.5 + 0.9 * 20 - 2.0, -2.0, 1 + 1.8 + 0.81 * 8 - 5.0]
    loss = made(double_dqn=False).losses(transitions()).terms["value_loss"]
    assert loss.item() == pytest.approx(sum(abs(error) - 0.5 for error in errors) / 3)


def test_errors_below_one_are_squared_and_larger_ones_have_a_gradient_of_one() -> None:
    algo = made()
    batch = dataclasses.replace(transitions(), reward=torch.tensor([0.5, 2.5, 1.0]))
    algo.losses(batch).terms["value_loss"].backward()
    expected = torch.zeros(3, 2)
    expected[0, 1], expected[1, 0], expected[2, 0] = -1 / 3, 0.5 / 3, -1 / 3
    torch.testing.assert_close(algo.actor.values.grad, expected)
    assert algo.target.network.values.grad is None


def test_losses_are_weighted_and_the_sizes_of_errors_are_the_new_priorities() -> None:
    weights = torch.tensor([1.0, 0.5, 0.25])
    batch = transitions(weights=weights)
    losses = made().losses(batch)
    loss, priorities = losses.terms["value_loss"].item(), losses.feedback.priorities
    assert priorities is not None
    assert loss == pytest.approx((HUBER[0] + 0.5 * HUBER[1] + 0.25 * HUBER[2]) / 3)
    assert priorities.tolist() == pytest.approx([abs(error) for error in ERRORS])


def test_rewards_are_scaled_then_clipped_one_by_one() -> None:
    config = DQNConfig(discounting=0.9, reward_clipping="abs_one", reward_scale=0.8)
    targets = DQN(Table(LEARNT), config).targets(transitions(), torch.tensor([10.0, 3.0, 7.0]))
    expected = [0.4 + 0.9 * 10, 0.8, 0.8 + 0.9 * 1.0 + 0.81 * 7]
    assert targets.tolist() == pytest.approx(expected)


def test_epsilon_falls_by_the_collected_steps_and_stays_at_its_end() -> None:
    algo = made(exploration_steps=10, epsilon_end=0.1)
    step = OptimiserStep(algo, StepConfig(), total_steps=100)
    found = []
    for _ in range(4):
        step.update(transitions())
        found.append(algo.actor.epsilon.item())
    assert found == pytest.approx([1 - 0.9 * 0.4, 1 - 0.9 * 0.8, 0.1, 0.1])


@pytest.mark.parametrize(("before", "schedule"), [(0, 40_000_000), (2_999_900, 10_000_000)])
def test_epsilon_is_exact_however_little_it_falls_in_an_update(before: int, schedule: int) -> None:
    """A float32 near 1 cannot become smaller by the 0.95 / 40,000,000 of one step."""
    algos = [made(exploration_steps=schedule, epsilon_end=0.05) for _ in range(2)]
    step, resumed = (OptimiserStep(algo, StepConfig(), total_steps=schedule) for algo in algos)
    one_step = dataclasses.replace(transitions(), env_steps=1)
    step.counters.env_steps = before
    for _ in range(99):
        step.update(one_step)
    resumed.load_state_dict(step.state_dict())
    for each in (step, resumed):
        each.update(one_step)
    expected = 1 - 0.95 * (before + 100) / schedule
    found = [algo.actor.epsilon.item() for algo in algos]
    assert found == pytest.approx([expected, expected], abs=1e-7)


def test_the_target_network_is_copied_every_period_and_not_between() -> None:
    algo = made(target_period=3, optimiser=OptimiserConfig(optimiser="adam"))
    step, same = OptimiserStep(algo, StepConfig(), total_steps=100), []
    for _ in range(7):
        step.update(transitions())
        same.append(torch.equal(algo.target.network.values, algo.actor.values))
    assert same == [False, False, True, False, False, True, False]


def test_a_target_goes_a_share_of_the_way() -> None:
    network = nn.Linear(1, 1, bias=False)
    target = Target(network, rate=0.25, period=2)
    start = network.weight.item()
    with torch.no_grad():
        network.weight.add_(8.0)
    found = []
    for _ in range(4):
        target.follow(network)
        found.append(target.network.weight.item() - start)  # type: ignore[operator,union-attr]
    assert found == pytest.approx([0.0, 2.0, 2.0, 3.5])


def test_networks_and_spaces_that_do_not_fit_are_sentences() -> None:
    spec = ArraySpec((4,), "float32")
    with pytest.raises(UsageError, match="DQN needs a network of type QNetwork, got MLPNet"):
        DQN(MLPNet(spec, Discrete(2), False), DQNConfig())
    with pytest.raises(ValueError, match="QNet needs a Discrete action space, got Box"):
        make_model(ActorSpec("q-mlp"), spec, Box(-1.0, 1.0, (2,)))


def test_a_ladder_of_epsilons_is_used_when_asked_for() -> None:
    assert made().mode == "explore" and made(epsilon_ladder=True).mode == "ladder"
