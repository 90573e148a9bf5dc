# SPDX-License-Identifier: Apache-2.0
"""Acting with a model."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.actors.actor_critic import ModelInputs
from torchbeast.core.actors.policy import act
from torchbeast.core.actors.registry import make_model
from torchbeast.core.distributions import distribution_for
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.nest_py import flatten

SPACE, ACTIONS, B = ArraySpec((5,), "float32"), Discrete(4), 64


def inputs() -> ModelInputs:
    return ModelInputs(
        observation=torch.randn(1, 1, 5).expand(1, B, 5),
        reward=torch.zeros(1, B),
        done=torch.zeros(1, B, dtype=torch.bool),
        last_action=torch.zeros(1, B, dtype=torch.int64),
    )


@pytest.mark.parametrize("use_lstm", [False, True])
def test_acting_records_no_graph(use_lstm: bool) -> None:
    model = make_model("mlp", SPACE, ACTIONS, use_lstm)
    assert all(parameter.requires_grad for parameter in model.parameters())
    results = act(model, distribution_for(ACTIONS), inputs(), model.initial_state(B))
    leaves = flatten(results)
    assert len(leaves) == 3 + 2 * use_lstm
    for leaf in leaves:
        assert not leaf.requires_grad
        assert leaf.grad_fn is None


def test_greedy_takes_the_mode_and_otherwise_actions_are_sampled() -> None:
    model, distribution = make_model("mlp", SPACE, ACTIONS, False), distribution_for(ACTIONS)
    row = inputs()
    (greedy, logits, _), _ = act(model, distribution, row, (), greedy=True)
    assert torch.equal(greedy, logits.argmax(-1))
    (sampled, logits, _), _ = act(model, distribution, row, ())
    assert sampled.shape == (1, B)
    assert len(sampled.unique()) > 1


def test_greedy_acting_draws_no_random_number() -> None:
    model = make_model("mlp", SPACE, ACTIONS, False)
    row = inputs()
    before = torch.get_rng_state()
    act(model, distribution_for(ACTIONS), row, (), greedy=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_actions_and_another_seed_others() -> None:
    model, row = make_model("mlp", SPACE, ACTIONS, False), inputs()

    def actions(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        (action, _, _), _ = act(model, distribution_for(ACTIONS), row, ())
        return action

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(1), actions(2))
