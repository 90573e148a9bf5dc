# SPDX-License-Identifier: Apache-2.0
"""bench reports the cost of a network, leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.network_cost import Cost, costs, table
from fake_nethack import LEAVES, FakeNetHack

from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete, observation_spec


def agent_for(space: Any, model: str = "auto", use_lstm: bool = False) -> Agent:
    return make_agent(ActorSpec(model, use_lstm=use_lstm), space, Discrete(4), 1)


def costs_of(agent: Agent) -> list[Cost]:
    return costs(agent.model, agent.observation_space)


def test_every_leaf_of_nethack_has_its_cost() -> None:
    agent = agent_for(observation_spec(FakeNetHack.observation_space))
    whole, *leaves = costs_of(agent)
    assert sorted(leaf.name for leaf in leaves) == sorted(LEAVES)
    kinds = {leaf.name: leaf.kind for leaf in leaves}
    assert kinds["blstats"] == "normalised numbers" and kinds["glyphs"] == "map of categories"
    assert kinds["screen_descriptions"] == "map of strings"
    assert all(leaf.microseconds > 0 and leaf.parameters for leaf in leaves)
    rest = sum(p.numel() for name, p in agent.model.named_parameters() if "torsos." not in name)
    assert whole.parameters == sum(leaf.parameters for leaf in leaves) + rest
    times = [leaf.microseconds for leaf in leaves]
    assert times == sorted(times, reverse=True)
    assert len(table(costs_of(agent)).splitlines()) == 1 + len(LEAVES)


@pytest.mark.parametrize(
    ("model", "use_lstm"), [("auto", False), ("auto", True), ("q-auto", False), ("sac-auto", False)]
)
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (ArraySpec((8, 2), "float32", -float("inf"), float("inf")), "normalised numbers"),
        (ArraySpec((4, 36, 36, 3), "uint8", 0, 255), "image"),
    ],
)
def test_a_single_leaf_is_reported_with_its_kind(
    spec: ArraySpec, kind: str, model: str, use_lstm: bool
) -> None:
    agent = agent_for(spec, model, use_lstm)
    assert f"({kind}): " in table(costs_of(agent))


def test_leaves_of_nests_are_named_by_their_path() -> None:
    number = ArraySpec((2,), "float32")
    agent = agent_for({"b": (number, {"c": number}), "a": number})
    assert {cost.name for cost in costs_of(agent)[1:]} == {"a", "b.0", "b.1.c"}


def test_a_users_own_network_is_measured_as_a_whole() -> None:
    agent = agent_for(ArraySpec((1,), "float32"), "source_models:CountingNet")
    (whole,) = costs_of(agent)
    assert whole.microseconds > 0


def test_measuring_changes_neither_weights_nor_random_numbers_nor_threads() -> None:
    agent = agent_for(observation_spec(FakeNetHack.observation_space))
    before = {name: tensor.clone() for name, tensor in agent.model.state_dict().items()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    costs_of(agent)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(agent.model.state_dict(), before, rtol=0, atol=0)
