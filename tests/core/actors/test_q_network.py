# SPDX-License-Identifier: Apache-2.0
"""Q-networks explore with probability epsilon; no actor takes an action that is ruled out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.contract import Actor, ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.off_policy import QNet, QNetwork
from torchbeast.core.actors.registry import check_model, make_model
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete

B, ACTIONS = 20_000, 4
MODES: list[Any] = ["sample", "greedy", "explore"]
Q_NET = "q-shallow"


class Fixed(QNetwork):
    """These values, whatever it sees."""

    def __init__(self, q_values: list[float], start: int = 0) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(len(q_values), start))
        self._q_values = torch.tensor(q_values)

    def forward(self, observation: Any) -> Tensor:
        return self._q_values.expand(len(observation), -1)


class FixedPolicy(ActorCritic):
    """These logits, whatever it sees."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(len(logits)))
        self._logits = torch.tensor(logits)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        logits = self._logits.expand(*inputs.reward.shape, -1)
        return ModelOutput(logits, torch.zeros_like(inputs.reward), core_state)


def inputs(batch: int = B, last_action: int = 0) -> ModelInputs:
    return ModelInputs(
        observation=torch.zeros(1, batch, 5),
        reward=torch.zeros(1, batch),
        done=torch.zeros(1, batch, dtype=torch.bool),
        last_action=torch.full((1, batch), last_action),
    )


def shares(actor: Actor, mode: Any) -> Tensor:
    """Returns the frequency of each of the first actions."""
    return torch.bincount(actor.act(inputs(), (), mode).action[0], minlength=ACTIONS) / B


@pytest.mark.parametrize("epsilon", [0.0, 0.25, 1.0])
def test_exploring_takes_any_action_with_probability_epsilon(epsilon: float) -> None:
    actor = Fixed([0.0, 3.0, -1.0, 2.0])
    actor.epsilon.fill_(epsilon)
    expected = torch.full((ACTIONS,), epsilon / ACTIONS)
    expected[1] += 1 - epsilon
    torch.testing.assert_close(shares(actor, "explore"), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("mode", ["sample", "greedy"])
def test_what_is_learnt_takes_the_best_action_and_draws_nothing(mode: Any) -> None:
    actor = Fixed([0.0, 3.0, -1.0, 2.0])
    before = torch.get_rng_state()
    assert shares(actor, mode).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "actor",
    [Fixed([-math.inf, 3.0, -math.inf, 2.0]), FixedPolicy([-math.inf, 1.0, -math.inf, 0.5])],
    ids=["values", "policy"],
)
def test_an_action_that_is_ruled_out_is_taken_in_no_mode(actor: Actor, mode: Any) -> None:
    taken = shares(actor, mode)
    assert taken[[0, 2]].tolist() == [0.0, 0.0]
    assert taken[1] > 0.4 and (mode != "explore" or taken[3] > 0.3)


def test_exploring_is_uniform_over_what_is_legal() -> None:
    taken = shares(Fixed([-math.inf, 3.0, 0.0, 2.0]), "explore")
    expected = torch.tensor([0.0, 1.0, 1.0, 1.0]) / 3
    torch.testing.assert_close(taken, expected, rtol=0, atol=0.02)


def test_actions_count_from_the_spaces_start() -> None:
    actor = Fixed([0.0, 3.0, 1.0], start=5)
    assert actor.act(inputs(8, last_action=5), (), "greedy").action.eq(6).all()
    explored = actor.act(inputs(200, last_action=5), (), "explore").action
    assert explored.unique().tolist() == [5, 6, 7]


def test_epsilon_travels_with_the_weights() -> None:
    learner = make_model(ActorSpec(Q_NET), ArraySpec((5,), "float32"), Discrete(4))
    replica = copy.deepcopy(learner)
    learner.epsilon.fill_(0.05)
    replica.load_state_dict(learner.state_dict())
    assert replica.epsilon.item() == pytest.approx(0.05)
    assert "epsilon" not in dict(learner.named_parameters())


@pytest.mark.parametrize("space", [ArraySpec((5,), "float32"), ArraySpec((4, 40, 40), "uint8")])
def test_a_network_by_name_gives_the_values_it_acts_on(space: ArraySpec) -> None:
    actor = make_model(ActorSpec(Q_NET), space, Discrete(ACTIONS))
    assert isinstance(actor, QNet) and actor.separable
    seen = torch.zeros(1, 3, *space.shape, dtype=getattr(torch, space.dtype))
    acted = actor.act(inputs(3)._replace(observation=seen), (), "greedy")
    assert list(acted.extras) == ["q_values"]
    torch.testing.assert_close(acted.extras["q_values"], actor(seen[0]).unsqueeze(0))
    assert torch.equal(acted.action, acted.extras["q_values"].argmax(-1))
    actor(seen[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in actor.parameters())


def test_a_recurrent_network_is_refused() -> None:
    with pytest.raises(ValueError, match="single steps, which have no recurrent state: remove"):
        make_model(ActorSpec(Q_NET, use_lstm=True), ArraySpec((5,), "float32"), Discrete(4))


@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_a_space_whose_actions_cannot_be_listed_is_refused(bound: float) -> None:
    with pytest.raises(
        ValueError, match="QNet needs a Discrete action space, got Box of float32: use "
    ):
        make_model(ActorSpec(Q_NET), ArraySpec((5,), "float32"), Box(-bound, bound, (2,)))


def test_an_actor_whose_values_have_another_shape_is_refused() -> None:
    wrong = Fixed([0.0, 1.0, 2.0])
    wrong.distribution = distribution_for(Discrete(2))
    with pytest.raises(ValueError, match=r"an extra does not fit: .* \[1, 3, 3\].* \[1, 3, 2\]"):
        check_model(wrong, ArraySpec((5,), "float32"), "Fixed")
