# SPDX-License-Identifier: Apache-2.0
"""Acting: what every actor promises, and what an actor-critic makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchbeast.core.actors.contract import Actor, ActorCritic, ModelInputs, specs_of_extras
from torchbeast.core.actors.registry import make_model
from torchbeast.core.base.nest import flatten
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete

SPACE, ACTIONS, B = ArraySpec((5,), "float32"), Discrete(4), 64


def actor(use_lstm: bool = False) -> Actor:
    return make_model(ActorSpec("mlp", use_lstm=use_lstm), SPACE, ACTIONS)


def inputs() -> ModelInputs:
    return ModelInputs(
        observation=torch.randn(1, 1, 5).expand(1, B, 5),
        reward=torch.zeros(1, B),
        done=torch.zeros(1, B, dtype=torch.bool),
        last_action=torch.zeros(1, B, dtype=torch.int64),
    )


@pytest.mark.parametrize("mode", ["sample", "greedy", "explore"])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_acting_records_no_graph(use_lstm: bool, mode: Any) -> None:
    model = actor(use_lstm)
    assert all(parameter.requires_grad for parameter in model.parameters())
    leaves = flatten(tuple(model.act(inputs(), model.initial_state(B), mode)))
    assert len(leaves) == 3 + 2 * use_lstm
    for leaf in leaves:
        assert not leaf.requires_grad and leaf.grad_fn is None
    assert all(leaf.is_inference() for leaf in leaves)


def test_greedy_takes_the_mode_and_otherwise_actions_are_sampled() -> None:
    model, row = actor(), inputs()
    greedy = model.act(row, (), "greedy")
    assert torch.equal(greedy.action, greedy.extras["policy_logits"].argmax(-1))
    for mode in ("sample", "explore"):
        sampled = model.act(row, (), mode).action
        assert sampled.shape == (1, B)
        assert len(sampled.unique()) > 1


def test_greedy_acting_draws_no_random_number() -> None:
    model, row = actor(), inputs()
    before = torch.get_rng_state()
    model.act(row, (), "greedy")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_actions_and_another_seed_others() -> None:
    model, row = actor(), inputs()

    def actions(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.act(row, ()).action

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(1), actions(2))


def test_the_extras_are_as_they_are_declared() -> None:
    model = actor()
    extras = model.act(inputs(), ()).extras
    assert sorted(extras) == sorted(model.extra_specs) == ["baseline", "policy_logits"]
    for name, spec in model.extra_specs.items():
        assert extras[name].shape == (1, B, *spec.shape)
        assert extras[name].dtype == getattr(torch, spec.dtype)


def test_only_the_extras_that_are_asked_for_are_specified_in_that_order() -> None:
    model = actor()
    assert list(specs_of_extras(model, ["policy_logits"])) == ["policy_logits"]
    assert specs_of_extras(model, []) == {}


def test_an_extra_that_an_actor_does_not_give_is_named_with_what_it_gives() -> None:
    message = "MLPNet returns policy_logits, baseline .* needs q_values: use another model"
    with pytest.raises(ValueError, match=message):
        specs_of_extras(actor(), ["policy_logits", "q_values"])


def test_columns_may_be_separated_only_where_the_author_says_so() -> None:
    assert not Actor.separable and not ActorCritic.separable
    for name in ("deep", "shallow", "shallow-norm", "small", "mlp"):
        assert make_model(ActorSpec(name), ArraySpec((40, 40), "uint8"), ACTIONS).separable
