# SPDX-License-Identifier: Apache-2.0
"""The learner's forward, against one row and one column at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assorted import check_rollout
from torch import Tensor

from torchbeast.core.actors.contract import ActorCritic, ModelInputs
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

T, B = 8, 3
Make = Callable[..., Rollout]
TRUNCATED = {
    "nowhere": [],
    "once": [(3, 1)],
    "row 0, which belongs to the rollout before": [(0, 0)],
    "first and last row": [(1, 0), (8, 2)],
    "one row, several columns": [(4, 0), (4, 2)],
    "twice in a column": [(2, 1), (6, 1)],
    "neighbouring rows": [(2, 0), (3, 1), (4, 0)],
}


def model_with(use_lstm: bool) -> ActorCritic:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(3), use_lstm)


def one_by_one(model: ActorCritic, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, values and final values from forwards of one row of one column."""
    logits, values = torch.zeros(T + 1, B, 3), torch.zeros(T + 1, B)
    final_values = torch.zeros(T, B)
    finals = iter(rollout.final_observation)
    for b in range(B):
        state = map_leaves(lambda leaf, b=b: leaf[:, b : b + 1], rollout.initial_agent_state)
        for t in range(T + 1):
            here = (slice(t, t + 1), slice(b, b + 1))
            rest = (rollout.reward[here], rollout.done[here], rollout.action[here])
            if t > 0 and rollout.truncated[t, b]:
                last = ModelInputs(next(finals).view(1, 1, -1), rest[0], rest[1] & False, rest[2])
                final_values[t - 1, b] = model(last, state).baseline
            output = model(ModelInputs(rollout.observation[here], *rest), state)
            logits[t, b], values[t, b] = output.policy_logits, output.baseline
            state = output.core_state
    return logits, values, final_values


@pytest.mark.parametrize("places", TRUNCATED.values(), ids=TRUNCATED.keys())
@pytest.mark.parametrize("use_lstm", [False, True])
def test_unrolling_equals_one_row_and_column_at_a_time(
    make_rollout: Make, use_lstm: bool, places: Any
) -> None:
    model = model_with(use_lstm)
    state = map_leaves(torch.randn_like, model.initial_state(B))
    rollout = make_rollout(T, B, truncated=places, terminated=[(5, 0), (0, 1)], state=state)
    check_rollout(rollout)
    result = unroll(model, rollout)
    for got, expected in zip(result[:3], one_by_one(model, rollout), strict=True):
        torch.testing.assert_close(got, expected)
    assert (result.final_values != 0).sum() == rollout.truncated[1:].sum()


@pytest.mark.parametrize("use_lstm", [False, True])
def test_final_values_have_no_graph_and_the_others_have(make_rollout: Make, use_lstm: bool) -> None:
    model = model_with(use_lstm)
    rollout = make_rollout(T, B, truncated=[(3, 1)], state=model.initial_state(B))
    logits, values, final_values, _ = unroll(model, rollout)
    assert logits.requires_grad
    assert values.requires_grad
    assert not final_values.requires_grad


def test_a_feed_forward_model_runs_once_without_truncations(make_rollout: Make) -> None:
    model, calls = model_with(False), []
    model.register_forward_hook(lambda _module, inputs, _output: calls.append(inputs[0]))
    unroll(model, make_rollout(T, B, terminated=[(3, 1)]))
    unroll(model, make_rollout(T, B, truncated=[(3, 1), (5, 2)]))
    assert [inputs.reward.shape for inputs in calls] == [(T + 1, B), (T + 1, B), (1, 2)]
