# SPDX-License-Identifier: Apache-2.0
"""An LSTM over rollouts, whose state is reset where episodes start."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

LSTMState = tuple[Tensor, Tensor]  # hidden and cell, [layers, B, hidden] each

FORGET_BIAS = 1.0


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


def initial_lstm_state(lstm: nn.LSTM, batch_size: int) -> LSTMState:
    """Returns a state of zeros, two tensors [layers, B, hidden] on the LSTM's device."""
    shape = (lstm.num_layers, batch_size, lstm.hidden_size)
    device = next(lstm.parameters()).device
    return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


def run_lstm(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: LSTMState
) -> tuple[Tensor, LSTMState]:
    """Runs the LSTM over T rows; returns outputs [T, B, hidden] and the state after the last row.

    features: [T, B, input_size].
    done: bool [T, B]; a column's state is zeroed before each row where it is true.
    state: before row 0, [layers, B, hidden] each.

    All rows between two resets are one call, so that long episodes need no loop over time.
    """
    outputs = []
    for start, end in pairwise(_bounds(done)):
        state = _reset(state, done[start])
        output, state = lstm(features[start:end], state)
        outputs.append(output)
    return torch.cat(outputs), state


def _bounds(done: Tensor) -> list[int]:
    """Returns 0, every later row in which an episode starts, and T."""
    starts = done[1:].any(1).nonzero().flatten() + 1
    return [0, *starts.tolist(), len(done)]


def _reset(state: LSTMState, done: Tensor) -> LSTMState:
    """Returns the state with the columns where done [B] zeroed, even those that hold NaN."""
    ended = done.view(1, -1, 1)
    hidden, cell = state
    return hidden.masked_fill(ended, 0.0), cell.masked_fill(ended, 0.0)
