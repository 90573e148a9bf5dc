# SPDX-License-Identifier: Apache-2.0
"""An LSTM or GRU over rollouts, whose state is reset where episodes start."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from torchbeast.core.nest_py import Nest, map_leaves
from torchbeast.core.specs import SpecError

LSTMState = tuple[Tensor, Tensor]  # hidden and cell, [layers, B, hidden] each

State = TypeVar("State", Tensor, LSTMState)
Core = nn.LSTM | nn.GRU

FORGET_BIAS = 1.0


def make_core(
    kind: str, input_size: int, hidden_size: int, num_layers: int = 1, usual: bool = False
) -> Core:
    """Returns an "lstm" or "gru"; usual: whether an LSTM has PyTorch's initialisation, not
    make_lstm's. A GRU has PyTorch's. Raises SpecError for another kind.
    """
    if kind == "gru":
        return nn.GRU(input_size, hidden_size, num_layers)
    if kind != "lstm":
        raise SpecError(
            f"the model's keyword argument core must be lstm or gru, got {json.dumps(kind)}"
        )
    if usual:
        return nn.LSTM(input_size, hidden_size, num_layers)
    return make_lstm(input_size, hidden_size, num_layers)


def no_core(kind: str) -> Core | None:
    """Returns None, the core of a network without memory; SpecError where one was asked for."""
    if kind != "lstm":
        raise SpecError(
            f"the model's keyword argument core, {json.dumps(kind)}, is the kind of its memory, "
            "but it has none: add --use_lstm, or leave core out"
        )
    return None


def make_lstm(input_size: int, hidden_size: int, num_layers: int = 1) -> nn.LSTM:
    """Returns an LSTM whose forget gates are biased to remember (Jozefowicz et al. 2015).

    With PyTorch's initialisation the forget gates start near sigmoid(0), so that an input of 8
    steps ago, and the gradient back to it, is scaled by 0.5^8. FORGET_BIAS makes that 0.73^8, as in
    the LSTM of the IMPALA paper's program.
    """
    lstm = nn.LSTM(input_size, hidden_size, num_layers)
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_ih"):
            with torch.no_grad():
                _forget_gate(parameter).add_(FORGET_BIAS)
    return lstm


def _forget_gate(bias: Tensor) -> Tensor:
    """Returns the forget gate's slice; PyTorch orders gates as input, forget, cell, output."""
    return bias.chunk(4)[1]


def initial_lstm_state(lstm: Core, batch_size: int) -> LSTMState:
    """Returns a state of zeros, two tensors [layers, B, hidden] on the LSTM's device."""
    shape = (lstm.num_layers, batch_size, lstm.hidden_size)
    device = next(lstm.parameters()).device
    return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


def initial_core_state(core: Core, batch_size: int) -> Nest[Tensor]:
    """Returns a state of zeros: that of an LSTM, or one tensor [layers, B, hidden] of a GRU."""
    hidden, cell = initial_lstm_state(core, batch_size)
    return hidden if isinstance(core, nn.GRU) else (hidden, cell)


def run_core(
    core: Core, features: Tensor, done: Tensor, state: Nest[Tensor]
) -> tuple[Tensor, Nest[Tensor]]:
    """Runs an LSTM or GRU over T rows, as run_lstm does."""
    if isinstance(core, nn.GRU):
        return _run(core, features, done, cast(Tensor, state))
    return run_lstm(core, features, done, cast(LSTMState, state))


def run_lstm(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: LSTMState
) -> tuple[Tensor, LSTMState]:
    """Runs the LSTM over T rows; returns outputs [T, B, hidden] and the state after the last row.

    features: [T, B, input_size].
    done: bool [T, B]; a column's state is zeroed before each row where it is true.
    state: before row 0, [layers, B, hidden] each.
    """
    return _run(lstm, features, done, state)


def _run(core: nn.Module, features: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
    """Runs a core over T rows.

    All rows between two resets are one call, so that long episodes need no loop over time.
    """
    outputs = []
    for start, end in pairwise(_bounds(done)):
        state = _reset(state, done[start])
        output, state = core(features[start:end], state)
        outputs.append(output)
    return torch.cat(outputs), state


def _bounds(done: Tensor) -> list[int]:
    """Returns 0, every later row in which an episode starts, and T."""
    starts = done[1:].any(1).nonzero().flatten() + 1
    return [0, *starts.tolist(), len(done)]


def _reset(state: State, done: Tensor) -> State:
    """Returns the state with the columns where done [B] zeroed, even those that hold NaN."""
    ended = done.view(1, -1, 1)
    reset: State = map_leaves(lambda leaf: leaf.masked_fill(ended, 0.0), state)
    return reset
