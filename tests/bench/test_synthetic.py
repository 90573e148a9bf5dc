# SPDX-License-Identifier: Apache-2.0
"""Synthetic data has the shapes and dtypes of real data for any space."""

from __future__ import annotations

import itertools

import pytest
import torch
from assorted import check_rollout
from bench import synthetic

from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.computing import CudaStream
from torchbeast.core.base.nest import flatten
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    Box,
    Discrete,
    MultiDiscrete,
    ObservationSpace,
)
from torchbeast.servers.source import answer, numbered

SPACES: list[tuple[ObservationSpace, ActionSpace]] = [
    (ArraySpec((3,), "float32"), Discrete(4, start=2)),
    ({"a": ArraySpec((2, 2), "uint8"), "b": ArraySpec((), "bool")}, MultiDiscrete((2, 3))),
    ((ArraySpec((1,), "int64"), ArraySpec((2,), "float64")), Box(-1.0, 1.0, (2,))),
]

every_space = pytest.mark.parametrize(("observations", "actions"), SPACES)


@every_space
@pytest.mark.parametrize("use_lstm", [False, True])
def test_a_synthetic_rollout_has_the_form_of_a_real_one(
    observations: ObservationSpace, actions: ActionSpace, use_lstm: bool
) -> None:
    agent = make_agent(ActorSpec("mlp", use_lstm=use_lstm), observations, actions, 1)
    rollout = synthetic.rollout(agent, observations, 4, 3, extras=["policy_logits"])
    check_rollout(rollout)
    assert (rollout.unroll_length, rollout.batch_size) == (4, 3)
    specs = flatten(observations)
    for leaf, spec in zip(flatten(rollout.observation), specs, strict=True):
        assert leaf.dtype == getattr(torch, spec.dtype) and leaf.shape[2:] == spec.shape
    log_probs = agent.model.distribution.log_prob(rollout.extras["policy_logits"], rollout.action)
    assert log_probs.isfinite().all()


@every_space
def test_a_synthetic_inference_request_can_be_answered(
    observations: ObservationSpace, actions: ActionSpace
) -> None:
    agent = make_agent(ActorSpec("mlp", use_lstm=True), observations, actions, 1)
    request = synthetic.inference_request(agent, observations, num_envs=5)
    (action, extras), (state, last_action, _) = answer(
        agent.model,
        CudaStream(torch.device("cpu")),
        request,
        ["policy_logits", "baseline"],
        "sample",
    )
    assert extras["policy_logits"].shape[:2] == extras["baseline"].shape == (1, 5)
    assert all(leaf.shape[:2] == (1, 5) for leaf in flatten(action) + flatten(last_action))
    assert all(leaf.shape[1] == 5 for leaf in flatten(state))


def test_environments_have_the_numbers_from_0_in_the_order_in_which_they_first_act() -> None:
    """An actor's ladder of epsilons begins there, as in MonoBeast."""
    agent = make_agent(ActorSpec("mlp"), *SPACES[0], 1)
    cpu, new_numbers, found = CudaStream(torch.device("cpu")), itertools.count(1), []
    for before in ([0, 0], [2, 0, 1]):
        env, (state, last_action, _) = synthetic.inference_request(agent, SPACES[0][0], len(before))
        request = numbered((env, (state, last_action, torch.tensor([before]))), new_numbers)
        _, (_, _, after) = answer(agent.model, cpu, request, [], "sample")
        assert agent.model.env_index is not None
        found.append((agent.model.env_index.tolist(), after.tolist()))
    assert found == [([0, 1], [[1, 2]]), ([1, 2, 0], [[2, 3, 1]])]
