# SPDX-License-Identifier: Apache-2.0
"""Masked actions in DQN and discrete SAC: never bootstrapped from, with numbers from the formulas.

Observations are {"numbers": [state], "action_mask": [3]}; networks are tables of states 0 and 1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActionMask, ModelInputs
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.off_policy import Critics, QNetwork, StochasticActorCritic
from torchbeast.core.algos.config import DQNConfig, SACConfig, StepConfig
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.algos.sac import SAC
from torchbeast.core.envs.spaces import Discrete
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import OptimiserStep

LEARNT = [[1.0, 2.0, 3.0], [9.0, 0.0, 1.0]]
TARGET = [[5.0, 6.0, 7.0], [8.0, 4.0, 3.0]]
ALPHA, GAMMA = 0.2, 0.9
# From state 0, to one where action 0 is masked; to the end, and to a cut, where nothing is allowed.
STATES = [0, 0, 1]
SEEN = [[1, 1, 1], [0, 1, 0], [1, 0, 1]]
NEXT = [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
ACTIONS = [2, 1, 0]


def observed(states: list[int], masks: list[list[int]]) -> Any:
    return {"numbers": torch.tensor(states), "action_mask": torch.tensor(masks, dtype=torch.int8)}


def transitions() -> Transitions:
    return Transitions(
        observation=observed(STATES, SEEN),
        action=torch.tensor(ACTIONS),
        reward=torch.tensor([0.5, 1.0, 2.0]),
        terminated=torch.tensor([False, True, False]),
        next_observation=observed([1, 1, 0], NEXT),
        env_steps=1,
    )


class QTable(QNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(3))
        self.action_mask = ActionMask((3,))
        self.values = nn.Parameter(torch.tensor(LEARNT))

    def forward(self, observation: Any) -> Tensor:
        return self.values[observation["numbers"].long()]


class TableCritics(Critics):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.tensor([LEARNT, TARGET]))

    def forward(self, observation: Any, action: Tensor | None = None) -> Tensor:
        return self.tables[:, observation["numbers"].long()]


class PolicyTable(StochasticActorCritic):
    def __init__(self) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(3))
        self.action_mask = ActionMask((3,))
        self.logits = nn.Parameter(torch.tensor(LEARNT) / 4)

    def forward(self, observation: Any) -> Tensor:
        return self.logits[observation["numbers"].long()]

    def make_critics(self) -> TableCritics:
        return TableCritics()


@pytest.mark.parametrize("double_dqn", [True, False])
@pytest.mark.parametrize("huber_delta", [None, 1.0, 2.5])
def test_dqn_s_loss_is_that_of_the_best_allowed_action(
    double_dqn: bool, huber_delta: float | None
) -> None:
    config = DQNConfig(
        discounting=GAMMA, reward_clipping="none", double_dqn=double_dqn, huber_delta=huber_delta
    )
    algo = DQN(QTable(), config)
    with torch.no_grad():
        algo.target.network.values.copy_(torch.tensor(TARGET))
    # Of actions 1 and 2 in state 1 the learnt table prefers the last, the target's the first. The
    # cut episode's mask allows nothing, so in state 0 all are: 7 of the last one by both.
    y = [0.5 + GAMMA * (3.0 if double_dqn else 4.0), 1.0, 2.0 + GAMMA * 7.0]
    values = [LEARNT[state][action] for state, action in zip(STATES, ACTIONS, strict=True)]
    errors = [abs(target - value) for target, value in zip(y, values, strict=True)]
    d = huber_delta or math.inf
    losses = [d * (e - d / 2) if e > d else e**2 / 2 for e in errors]
    loss = algo.losses(transitions()).terms["value_loss"]
    assert loss.item() == pytest.approx(sum(losses) / 3)


def policy(state: int, mask: list[int]) -> list[tuple[float, float]]:
    """Probabilities of all actions, and their logarithms, 0 where masked."""
    allowed = [bool(entry) or not any(mask) for entry in mask]
    weights = [math.exp(x / 4) * ok for x, ok in zip(LEARNT[state], allowed, strict=True)]
    probs = [weight / sum(weights) for weight in weights]
    return [(p, math.log(p) if p else 0.0) for p in probs]


def soft_value(state: int, mask: list[int]) -> float:
    """Sum over the allowed actions of pi (min Q - alpha log pi)."""
    rated = [min(pair) for pair in zip(LEARNT[state], TARGET[state], strict=True)]
    pairs = zip(policy(state, mask), rated, strict=True)
    return sum(p * (q - ALPHA * log_p) for (p, log_p), q in pairs)


def test_expectations_of_sac_are_over_allowed_actions_only() -> None:
    config = SACConfig(discounting=GAMMA, temperature=ALPHA, reward_clipping="none")
    losses = SAC(PolicyTable(), config).losses(transitions()).terms
    y = [0.5 + GAMMA * soft_value(1, NEXT[0]), 1.0, 2.0 + GAMMA * soft_value(0, NEXT[2])]
    squares = [
        sum(0.5 * (table[STATES[b]][ACTIONS[b]] - y[b]) ** 2 for table in (LEARNT, TARGET))
        for b in range(3)
    ]
    assert losses["critic_loss"].item() == pytest.approx(sum(squares) / 3, rel=1e-5)
    seen = list(zip(STATES, SEEN, strict=True))
    expected = -sum(soft_value(*each) for each in seen) / 3
    assert losses["actor_loss"].item() == pytest.approx(expected, rel=1e-5)
    entropy = -sum(p * log_p for each in seen for p, log_p in policy(*each)) / 3
    wanted = 0.98 * sum(math.log(sum(mask)) for mask in SEEN) / 3  # of 3, 1 and 2 actions
    expected = math.log(ALPHA) * (entropy - wanted)
    assert losses["temperature_loss"].item() == pytest.approx(expected, rel=1e-4)


def test_masked_actions_have_no_gradient_and_no_nan() -> None:
    algo = SAC(PolicyTable(), SACConfig(reward_clipping="none"))
    algo.losses(transitions()).terms["actor_loss"].backward()
    gradient = algo.actor.logits.grad
    assert gradient is not None and gradient[1, 1] == 0, "masked wherever state 1 is left"
    assert gradient[0].abs().gt(0).all() and gradient[1, [0, 2]].abs().gt(0).all()
    metrics = OptimiserStep(algo, StepConfig(), total_steps=100).update(transitions()).metrics
    assert all(math.isfinite(figure) for figure in metrics.values())


@pytest.mark.parametrize("network", [QTable, PolicyTable])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_exploring_draws_every_allowed_action_and_no_other(network: Any, epsilon: float) -> None:
    actor = network()
    actor.epsilon.fill_(epsilon)
    masks = [SEEN[b % 3] for b in range(300)]
    observation = {name: leaf[None] for name, leaf in observed([0] * 300, masks).items()}
    inputs = ModelInputs(observation, torch.zeros(1, 300), torch.zeros(1, 300), torch.zeros(1, 300))
    torch.manual_seed(0)
    allowed = {(b, action) for b in range(3) for action in range(3) if SEEN[b][action]}
    for mode in ("explore", "sample", "greedy"):
        taken = actor.act(inputs, (), mode).action[0]
        found = {(b % 3, int(action)) for b, action in enumerate(taken)}
        assert found <= allowed
        if mode == "explore" and not (network is QTable and epsilon == 0.0):
            assert found == allowed
