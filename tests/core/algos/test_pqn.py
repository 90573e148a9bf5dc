# SPDX-License-Identifier: Apache-2.0
"""PQN's targets and gradients, compared with the paper's recursion written as a loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.actors.off_policy import QNetwork
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.config import PQNConfig, StepConfig
from torchbeast.core.algos.pqn import PQN
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError

T, B, STATES, ACTIONS = 6, 4, 7, 3
GAMMA, LAMBDA = 0.9, 0.6
TERMINATED, TRUNCATED = [(2, 0), (6, 1)], [(3, 1), (5, 2), (6, 3)]  # rows and columns
INVALID = [(1, 3), (4, 0), (6, 2)]


class Table(QNetwork):
    separable = True

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(ACTIONS))
        self.values = nn.Parameter(values.clone())

    def forward(self, observation: Any) -> Tensor:
        return self.values[observation]


def made(**settings: Any) -> PQN:
    torch.manual_seed(0)
    given = {"discounting": GAMMA, "reward_clipping": "none", "q_lambda": LAMBDA, **settings}
    return PQN(Table(torch.randn(STATES, ACTIONS)), PQNConfig(**given))


@pytest.fixture
def batch(make_rollout: Callable[..., Rollout], request: pytest.FixtureRequest) -> Rollout:
    """A batch without invalid steps, or with those of the parameter."""
    shape, invalid = (T + 1, B), getattr(request, "param", [])
    valid = torch.ones(shape, dtype=torch.bool)
    for place in invalid:
        valid[place] = False
    return make_rollout(
        T,
        B,
        terminated=TERMINATED,
        truncated=TRUNCATED,
        observation=torch.randint(STATES, shape),
        final_observation=torch.randint(STATES, (len(TRUNCATED),)),
        valid=valid if invalid else None,
        extras={},
    )


masked = pytest.mark.parametrize("batch", [[], INVALID], ids=["", "masked"], indirect=True)


def loss_of_the_paper(table: Tensor, batch: Rollout, scale: float = 1.0) -> Tensor:
    """Equation 3, backwards and step by step. A step that is not valid has no loss, and the return
    before it continues with the value of its state.
    """
    finals = {place: i for i, place in enumerate(sorted(TRUNCATED))}
    losses = []
    for b in range(B):
        target = table[batch.observation[T, b]].max().detach()
        for t in reversed(range(T)):
            if batch.valid is not None and not batch.valid[t + 1, b]:
                target = table[batch.observation[t, b]].max().detach()
                continue
            reward = scale * batch.reward[t + 1, b]
            if batch.truncated[t + 1, b]:
                last = batch.final_observation[finals[(t + 1, b)]]
                target = reward + GAMMA * table[last].max().detach()
            elif batch.done[t + 1, b]:
                target = reward
            else:
                following = table[batch.observation[t + 1, b]].max().detach()
                target = reward + GAMMA * (LAMBDA * target + (1 - LAMBDA) * following)
            chosen = table[batch.observation[t, b], batch.action[t + 1, b]]
            losses.append(0.5 * (target - chosen) ** 2)
    return torch.stack(losses).mean()


@masked
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_gradient_is_that_of_the_papers_recursion(batch: Rollout, scale: float) -> None:
    algo = made(reward_scale=scale)
    loss = algo.losses(algo.prepare(batch)).terms["value_loss"]
    loss.backward()
    table = nn.Parameter(algo.actor.values.detach().clone())
    expected = loss_of_the_paper(table, batch, scale)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(algo.actor.values.grad, table.grad)


@masked
def test_minibatches_are_all_steps_once_an_epoch_with_their_targets(batch: Rollout) -> None:
    algo = made(num_epochs=2, num_mini_batch=5)
    found = list(algo.minibatches(algo.prepare(batch)))
    assert len(found) == 2 * 5
    whole = algo.losses(algo.prepare(batch)).terms["value_loss"]
    for epoch in (found[:5], found[5:]):
        sums = [algo.losses(part).terms["value_loss"] * part.num_steps for part in epoch]
        torch.testing.assert_close(sum(sums) / batch.num_steps, whole)


def test_targets_stay_those_of_the_weights_before_the_batch(batch: Rollout) -> None:
    algo = made(num_epochs=3, num_mini_batch=1)
    before = algo.prepare(batch).extras["value_targets"]
    seen = []
    for minibatch in algo.minibatches(algo.prepare(batch)):
        seen.append(minibatch.extras["value_targets"][1:].sort(-1).values)
        with torch.no_grad():
            algo.actor.values += 1.0
    assert len(seen) == 3
    for targets in seen:
        torch.testing.assert_close(
            targets.flatten().sort().values, before[1:].flatten().sort().values
        )


def test_epsilon_falls_by_the_collected_steps(batch: Rollout) -> None:
    algo = made(exploration_steps=4 * T * B, epsilon_end=0.1, num_mini_batch=1, num_epochs=1)
    step = OptimiserStep(algo, StepConfig(), total_steps=10_000)
    found = []
    for _ in range(5):
        step.update(batch)
        found.append(algo.actor.epsilon.item())
    assert found == pytest.approx([1 - 0.9 / 4, 1 - 0.9 / 2, 1 - 0.9 * 3 / 4, 0.1, 0.1])


def test_an_illegal_action_is_no_target(batch: Rollout) -> None:
    class Masked(Table):
        def __call__(self, observation: Any) -> Tensor:
            outputs: Tensor = super().__call__(observation)
            return outputs.index_fill(-1, torch.tensor([2]), -torch.inf)

    torch.manual_seed(0)
    values = torch.randn(STATES, ACTIONS)
    values[:, 2] = 100.0
    batch = dataclasses.replace(batch, action=batch.action.clamp(max=1))
    config = PQNConfig(discounting=GAMMA, reward_clipping="none", q_lambda=LAMBDA)
    algo = PQN(Masked(values), config)
    loss = algo.losses(algo.prepare(batch)).terms["value_loss"]
    torch.testing.assert_close(loss, loss_of_the_paper(values[:, :2], batch))


def test_the_networks_of_its_family_normalise_every_hidden_layer() -> None:
    net = make_model(ActorSpec("pqn-mlp"), ArraySpec((4,), "float32"), Discrete(2))
    assert [type(norm) for norm in net.features.norms] == [nn.LayerNorm] * 2  # type: ignore
    plain = make_model(ActorSpec("q-mlp"), ArraySpec((4,), "float32"), Discrete(2))
    assert not any(isinstance(module, nn.LayerNorm) for module in plain.modules())


def test_an_actor_critic_is_refused() -> None:
    net = MLPNet(ArraySpec((4,), "float32"), Discrete(2), use_lstm=False)
    with pytest.raises(UsageError, match="PQN"):
        PQN(net, PQNConfig())
