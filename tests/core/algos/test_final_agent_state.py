# SPDX-License-Identifier: Apache-2.0
"""The state that a replay feeds back: the one with which the next unroll, from row T, begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import impala
from torch import Tensor

from torchbeast.core.actors.contract import ActorCritic, ModelInputs
from torchbeast.core.actors.networks import AtariNet, MLPNet
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import Nest, flatten, map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

T, B = 6, 5
COLUMN = (T + 1) * 4 * 4  # bytes: observations of four floats
Make = Callable[..., Rollout]
ENDS: dict[str, dict[str, list[tuple[int, int]]]] = {
    "nowhere": {},
    "row 0": {"terminated": [(0, 0)], "truncated": [(0, 1)]},
    "row 1": {"terminated": [(1, 0)], "truncated": [(1, 1)]},
    "the row before the last": {"terminated": [(T - 1, 0)], "truncated": [(T - 1, 1)]},
    "the last row": {"terminated": [(T, 0)], "truncated": [(T, 1)]},
    "the last two rows of a column": {"truncated": [(T - 1, 2), (T, 2)]},
    "every row": {"truncated": [(t, 3) for t in range(T + 1)]},
    "many": {
        "terminated": [(2, 0), (3, 0), (T, 4)],
        "truncated": [(2, 1), (4, 1), (T, 1), (5, 3), (1, 4), (T - 1, 4)],
    },
}


def recurrent(core: str = "lstm") -> ActorCritic:
    length = 3 if core == "gtrxl" else None
    space = ArraySpec((4,), "float32")
    return MLPNet(space, Discrete(3), use_lstm=True, core=core, core_length=length)


def asking(make_rollout: Make, model: ActorCritic, steps: int = T, **settings: Any) -> Rollout:
    """A rollout with a random state, which asks for the state before row T."""
    state = map_leaves(torch.randn_like, model.initial_state(B))
    return make_rollout(steps, B, state=state, feeds_back=True, **settings)


@torch.no_grad()
def by_hand(model: ActorCritic, rollout: Rollout) -> Nest[Tensor]:
    """The state after rows 0..T-1, one row of one column at a time."""
    states = []
    for b in range(B):
        state = map_leaves(lambda leaf, b=b: leaf[:, b : b + 1], rollout.initial_agent_state)
        for t in range(rollout.unroll_length):
            row = map_leaves(
                lambda leaf, t=t, b=b: leaf[t : t + 1, b : b + 1],
                (rollout.observation, rollout.reward, rollout.done, rollout.action),
            )
            state = model(ModelInputs(*row), state).core_state
        states.append(flatten(state))
    return tuple(torch.cat(leaf, 1) for leaf in zip(*states, strict=True))


@pytest.mark.parametrize("core", ["lstm", "gtrxl"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_the_final_state_is_the_state_after_rows_0_to_T_minus_1(
    make_rollout: Make, ends: Any, core: str
) -> None:
    model = recurrent(core)
    rollout = asking(make_rollout, model, **ends)
    found = unroll(model, rollout).final_state
    torch.testing.assert_close(found, by_hand(model, rollout))
    assert all(not leaf.requires_grad for leaf in flatten(found))


def test_the_final_state_has_every_layer(make_rollout: Make) -> None:
    model = AtariNet(ArraySpec((1, 36, 36), "uint8"), Discrete(3), True)
    observation = torch.randint(256, (T + 1, B, 1, 36, 36), dtype=torch.uint8)
    rollout = asking(
        make_rollout,
        model,
        truncated=[(3, 1)],
        observation=observation,
        final_observation=observation[3, 1:2],
    )
    found = unroll(model, rollout).final_state
    expected: Any = by_hand(model, rollout)
    assert expected[0].shape[0] == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_final_state_of_a_single_step_is_the_state_after_row_0(make_rollout: Make) -> None:
    model = recurrent()
    rollout = asking(make_rollout, model, steps=1, truncated=[(1, 0)])
    found = unroll(model, rollout).final_state
    torch.testing.assert_close(found, by_hand(model, rollout))


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_asking_for_the_final_state_changes_no_output(make_rollout: Make, ends: Any) -> None:
    model = recurrent()
    rollout = asking(make_rollout, model, **ends)
    plain = unroll(model, dataclasses.replace(rollout, feeds_back=False))
    assert plain.final_state is None
    torch.testing.assert_close(unroll(model, rollout)[:3], plain[:3])


@pytest.mark.parametrize("core", ["lstm", "gtrxl"])
def test_a_final_state_fed_back_continues_the_episode_like_one_long_unroll(
    make_rollout: Make, core: str
) -> None:
    """Row T is read twice: last in the first rollout, and first in the second."""
    model = recurrent(core)
    whole = asking(make_rollout, model, 2 * T, terminated=[(T, 0), (2, 1)], truncated=[(T + 2, 2)])
    expected = unroll(model, whole)
    first, second = (rows(whole, start, start + T + 1) for start in (0, T))
    first = dataclasses.replace(first, final_observation=whole.final_observation[:0])
    state = unroll(model, first).final_state
    found = unroll(model, dataclasses.replace(second, initial_agent_state=state))
    torch.testing.assert_close(found.policy_logits, expected.policy_logits[T:])
    torch.testing.assert_close(found.baseline, expected.baseline[T:])
    torch.testing.assert_close(found.final_values, expected.final_values[T:])


def rows(rollout: Rollout, start: int, end: int) -> Rollout:
    def cut(leaf: Tensor) -> Tensor:
        return leaf[start:end] if len(leaf) == 2 * T + 1 else leaf

    return rollout.map(cut)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("columns", [1, 2, B])
@pytest.mark.parametrize("ends", [ENDS["nowhere"], ENDS["many"]], ids=["nowhere", "many"])
def test_slices_and_threads_return_the_final_state_of_all_columns(
    make_rollout: Make, ends: Any, columns: int, num_threads: int
) -> None:
    model = recurrent()
    rollout = asking(make_rollout, model, **ends)
    expected = by_hand(model, rollout)  # of the weights before the update
    parts = impala(model, bytes_at_once=columns * COLUMN, num_threads=num_threads)
    torch.testing.assert_close(parts.update(rollout).feedback.final_state, expected)


def test_a_feed_forward_model_runs_once_when_asked_for_its_final_state(make_rollout: Make) -> None:
    model, calls = MLPNet(ArraySpec((4,), "float32"), Discrete(3), False), []
    model.register_forward_hook(lambda _module, inputs, _output: calls.append(inputs[0]))
    unroll(model, make_rollout(T, B, feeds_back=True))
    assert [len(inputs.reward) for inputs in calls] == [T + 1]
