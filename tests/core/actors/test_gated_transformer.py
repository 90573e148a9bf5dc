# SPDX-License-Identifier: Apache-2.0
"""The gated transformer-XL against its definition, row by row, and over episode borders."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.cores import (
    GATE_BIAS,
    GatedTransformerXL,
    initial_core_state,
    make_core,
    run_core,
)

T, B, SIZE, HIDDEN, LENGTH = 11, 3, 5, 8, 4
HEADS = 4


def core_of(num_layers: int) -> GatedTransformerXL:
    """Returns a core all of whose parameters are random."""
    core = make_core("gtrxl", SIZE, HIDDEN, num_layers, LENGTH)
    assert isinstance(core, GatedTransformerXL)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return core


def gated(gate: Any, x: Tensor, y: Tensor) -> Tensor:
    """The three equations of the GRU-type gate, for one vector."""
    reset_y, update_y, new_y = (gate.of_y.weight[i * HIDDEN : (i + 1) * HIDDEN] for i in range(3))
    reset_x, update_x = gate.of_x.weight[:HIDDEN], gate.of_x.weight[HIDDEN:]
    r = torch.sigmoid(reset_y @ y + reset_x @ x)
    z = torch.sigmoid(update_y @ y + update_x @ x + gate.bias)
    h = torch.tanh(new_y @ y + gate.of_reset.weight @ (r * x))
    return (1 - z) * x + z * h


def position_of(distance: int) -> Tensor:
    """Sines, then cosines, of the distance over wavelengths that grow from 1 to 10,000."""
    rates = [10_000 ** (-i / (HIDDEN // 2 - 1)) for i in range(HIDDEN // 2)]
    sines = [math.sin(distance * rate) for rate in rates]
    return torch.tensor(sines + [math.cos(distance * rate) for rate in rates])


def layer_row(layer: Any, rows: list[Tensor]) -> Tensor:
    """The output of the last of these rows of one episode and column."""
    normed = [layer.norm(row) for row in rows[-LENGTH - 1 :]]
    query = layer.query.weight @ normed[-1]
    to_keys, to_values = layer.keys_values.weight[:HIDDEN], layer.keys_values.weight[HIDDEN:]
    outputs = []
    for head in range(HEADS):
        part = slice(head * HIDDEN // HEADS, (head + 1) * HIDDEN // HEADS)
        scores = []
        for distance, row in enumerate(reversed(normed)):
            place = layer.position_keys.weight @ position_of(distance)
            content = (query + layer.content_bias)[part] @ (to_keys @ row)[part]
            score = content + (query + layer.position_bias)[part] @ place[part]
            scores.append(score / math.sqrt(HIDDEN // HEADS))
        weights = torch.stack(scores).softmax(0)
        values = torch.stack([(to_values @ row)[part] for row in reversed(normed)])
        outputs.append(weights @ values)
    y = torch.relu(layer.heads_joined.weight @ torch.cat(outputs))
    x = gated(layer.attention_gate, rows[-1], y)
    return gated(layer.mlp_gate, x, torch.relu(layer.mlp(x)))


def by_definition(core: GatedTransformerXL, features: Tensor, done: Tensor) -> Tensor:
    """Returns the outputs of episodes that start at row 0, one row, layer and column at a time."""
    columns = []
    for b in range(features.shape[1]):
        episodes: list[list[Tensor]] = []
        for t in range(len(features)):
            if t == 0 or done[t, b]:
                episodes.append([])
            episodes[-1].append(core.embedding(features[t, b]))
        for layer in core.layers:
            episodes = [
                [layer_row(layer, rows[: t + 1]) for t in range(len(rows))] for rows in episodes
            ]
        columns.append(torch.stack([row for rows in episodes for row in rows]))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_an_unroll_is_computed_as_the_paper_defines_each_row(num_layers: int) -> None:
    core = core_of(num_layers)
    features, done = torch.randn(T, B, SIZE, requires_grad=True), torch.rand(T, B) < 0.2
    output, _ = run_core(core, features, done, initial_core_state(core, B))
    expected = by_definition(core, features, done)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(output)
    gradients = [torch.autograd.grad((o * weights).sum(), features)[0] for o in (output, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 3, LENGTH, 10])
def test_an_unroll_continues_from_the_state_of_the_one_before(cut: int) -> None:
    """Also one row at a time, as acting does; the states are equal as well."""
    core = core_of(2)
    for _ in range(10):
        features, done = torch.randn(T, B, SIZE), torch.rand(T, B) < 0.2
        whole, state_of_whole = run_core(core, features, done, initial_core_state(core, B))
        outputs, state = [], initial_core_state(core, B)
        for start in range(0, T, cut):
            rows = slice(start, start + cut)
            output, state = run_core(core, features[rows], done[rows], state)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs), whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state, state_of_whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_layer_reaches_back_over_exactly_its_length(num_layers: int) -> None:
    reached = torch.zeros(T, dtype=torch.bool)
    for _ in range(10):  # a ReLU may block a row of one core
        core = core_of(num_layers)
        features, done = torch.randn(T, 1, SIZE, requires_grad=True), torch.zeros(T, 1).bool()
        output, _ = run_core(core, features, done, initial_core_state(core, 1))
        (gradient,) = torch.autograd.grad(output[-1].sum(), features)
        reached |= gradient.abs().sum((1, 2)) > 0
    oldest = T - 1 - num_layers * LENGTH
    assert reached.tolist() == [t >= oldest for t in range(T)]


def test_an_episode_forgets_whatever_was_before_it() -> None:
    core = core_of(2)
    features, done = torch.randn(3, B, SIZE), torch.zeros(3, B).bool()
    done[0] = True
    empty: Any = initial_core_state(core, B)
    broken = tuple(torch.full_like(leaf, torch.nan) for leaf in empty)
    (fresh, state), (after_nan, other) = (
        run_core(core, features, done, s) for s in (empty, broken)
    )
    assert torch.equal(fresh, after_nan)
    torch.testing.assert_close(state, other, atol=0, rtol=0)


def test_a_new_gate_passes_on_most_of_its_first_input() -> None:
    core: Any = make_core("gtrxl", SIZE, 256, 1, LENGTH)
    x = torch.randn(1, B, 256)
    kept = 1 - torch.sigmoid(torch.tensor(-GATE_BIAS))
    gate = core.layers[0].mlp_gate
    slope = (gate(x, torch.zeros_like(x)) * x).sum() / x.square().sum()
    torch.testing.assert_close(slope, kept, atol=0.08, rtol=0)
