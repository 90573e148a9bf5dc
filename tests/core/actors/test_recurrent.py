# SPDX-License-Identifier: Apache-2.0
"""An LSTM and a GRU run in segments, against a loop over steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.cores import initial_core_state, make_core, run_core
from torchbeast.core.actors.registry import make_model
from torchbeast.core.base.specs import ActorSpec, SpecError
from torchbeast.core.envs.spaces import ArraySpec, Discrete

T, B, SIZE, HIDDEN, LAYERS = 9, 3, 4, 5, 2


def step_by_step(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    outputs = []
    for row, ended in zip(features, done, strict=True):
        keep = (~ended).float().view(1, -1, 1)
        output, state = lstm(row.unsqueeze(0), (state[0] * keep, state[1] * keep))
        outputs.append(output)
    return torch.cat(outputs), state


PATTERNS: dict[str, list[tuple[int, int]]] = {
    "nowhere": [],
    "first row": [(0, 0), (0, 2)],
    "last row": [(8, 1)],
    "one column": [(3, 1)],
    "all columns": [(4, 0), (4, 1), (4, 2)],
    "neighbouring rows": [(3, 0), (4, 1), (4, 0), (5, 2)],
    "every row": [(t, t % 3) for t in range(T)],
}


@pytest.mark.parametrize("places", PATTERNS.values(), ids=PATTERNS.keys())
def test_segments_equal_the_loop_over_steps(places: list[tuple[int, int]]) -> None:
    lstm = nn.LSTM(SIZE, HIDDEN, LAYERS)
    features = torch.randn(T, B, SIZE)
    done = torch.zeros(T, B, dtype=torch.bool)
    for place in places:
        done[place] = True
    state = (torch.randn(LAYERS, B, HIDDEN), torch.randn(LAYERS, B, HIDDEN))
    output, after = run_core(lstm, features, done, state)
    expected, expected_after = step_by_step(lstm, features, done, state)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(after, expected_after)


def test_random_dones_equal_the_loop_over_steps_in_output_and_gradient() -> None:
    lstm = nn.LSTM(SIZE, HIDDEN, LAYERS)
    for _ in range(20):
        features = torch.randn(T, B, SIZE, requires_grad=True)
        done = torch.rand(T, B) < 0.2
        state = initial_core_state(lstm, B)
        gradients = [
            torch.autograd.grad(run(lstm, features, done, state)[0].square().sum(), features)[0]
            for run in (run_core, step_by_step)
        ]
        torch.testing.assert_close(*gradients)


def test_an_episode_forgets_whatever_was_before_it() -> None:
    lstm = nn.LSTM(SIZE, HIDDEN, LAYERS)
    features, done = torch.randn(1, B, SIZE), torch.ones(1, B, dtype=torch.bool)
    broken = torch.full((LAYERS, B, HIDDEN), torch.nan)
    fresh, _ = run_core(lstm, features, done, initial_core_state(lstm, B))
    after_nan, _ = run_core(lstm, features, done, (broken, broken))
    assert torch.equal(fresh, after_nan)


def test_the_initial_state_is_zero_and_has_no_graph() -> None:
    for part in initial_core_state(nn.LSTM(SIZE, HIDDEN, LAYERS), B):
        assert part.shape == (LAYERS, B, HIDDEN)
        assert not part.any()
        assert not part.requires_grad


def test_a_new_lstm_keeps_most_of_its_cell_over_a_step() -> None:
    """All layers; PyTorch's own initialisation keeps half."""
    lstm = make_core("lstm", SIZE, HIDDEN * 20, LAYERS, length=1)
    cell = torch.ones(LAYERS, B, HIDDEN * 20)
    _, (_, after) = lstm(torch.zeros(1, B, SIZE), (torch.zeros_like(cell), cell))
    kept = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(after.mean((1, 2)), kept.expand(LAYERS), atol=0.05, rtol=0)


def gru_by_hand(gru: nn.GRU, features: Tensor, done: Tensor, state: Tensor) -> Any:
    """PyTorch's GRU, one column and one step at a time; a state that is done is made anew."""
    columns = []
    for b in range(B):
        now: Tensor = state[:, b : b + 1]
        outputs: list[Tensor] = []
        for t in range(T):
            now = torch.zeros(LAYERS, 1, HIDDEN) if done[t, b] else now
            output, now = gru(features[t : t + 1, b : b + 1], now)
            outputs.append(output)
        columns.append((torch.cat(outputs), now))
    return tuple(torch.cat(parts, 1) for parts in zip(*columns, strict=True))


@pytest.mark.parametrize("places", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_gru_in_segments_equals_pytorchs_step_by_step(places: list[tuple[int, int]]) -> None:
    """Also its gradient, and a whole unroll equals one step at a time."""
    gru = make_core("gru", SIZE, HIDDEN, LAYERS, length=1)
    assert isinstance(gru, nn.GRU)
    features = torch.randn(T, B, SIZE, requires_grad=True)
    done = torch.zeros(T, B, dtype=torch.bool)
    for place in places:
        done[place] = True
    state = torch.randn(LAYERS, B, HIDDEN)
    found, expected = run_core(gru, features, done, state), gru_by_hand(gru, features, done, state)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(run[0].square().sum(), features) for run in (found, expected)]
    torch.testing.assert_close(*gradients)
    outputs: list[Tensor] = []
    now: Any = state
    for t in range(T):
        output, now = run_core(gru, features[t : t + 1], done[t : t + 1], now)
        outputs.append(output)
    torch.testing.assert_close((torch.cat(outputs), now), found)


@pytest.mark.parametrize("name", ["mlp", "shallow-norm", "shallow", "deep"])
def test_a_network_with_a_gru_is_made_from_its_keyword_argument(name: str) -> None:
    spec = ActorSpec(name, {"core": "gru", "hidden": 8, "core_layers": 3}, use_lstm=True)
    model: Any = make_model(spec, ArraySpec((1, 36, 36), "uint8"), Discrete(3))
    assert isinstance(model.core, nn.GRU)
    state = model.initial_state(B)
    assert isinstance(state, Tensor) and not state.any()
    assert state.shape == (3, B, model.core.hidden_size)


@pytest.mark.parametrize("name", ["mlp", "shallow-norm", "shallow", "deep"])
def test_a_network_with_a_gtrxl_has_a_memory_of_the_length_that_was_named(name: str) -> None:
    kwargs = {"core": "gtrxl", "hidden": 8, "core_layers": 2, "core_length": 5}
    model: Any = make_model(
        ActorSpec(name, kwargs, use_lstm=True), ArraySpec((1, 36, 36), "uint8"), Discrete(3)
    )
    assert [leaf.shape for leaf in model.initial_state(B)] == [(2 * 5, B, 8), (1, B, 1)]


@pytest.mark.parametrize(
    ("kwargs", "use_lstm", "reason"),
    [
        ({"core": "rnn"}, True, 'core must be lstm, gru or gtrxl, got "rnn"'),
        ({"core": "gru"}, False, "add use_lstm"),
        ({"core": "gtrxl", "hidden": 30}, True, "hidden must be a multiple of 4"),
        ({"core": "gtrxl", "core_length": 0}, True, "core_length must be a whole number"),
        ({"core_length": 9}, True, "core_length must be left out unless core is gtrxl"),
        ({"core_layers": 2}, False, "add use_lstm"),
        ({"core_layers": 1.5}, True, "core_layers must be a whole number"),
    ],
)
def test_a_core_that_there_is_not_is_refused(
    kwargs: dict[str, Any], use_lstm: bool, reason: str
) -> None:
    spec = ActorSpec("mlp", kwargs, use_lstm=use_lstm)
    with pytest.raises(SpecError, match=reason):
        make_model(spec, ArraySpec((3,), "float32"), Discrete(3))
