# SPDX-License-Identifier: Apache-2.0
"""An LSTM over rows of which some start episodes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

LSTMState = tuple[Tensor, Tensor]  # hidden and cell, [layers, B, hidden] each

FORGET_BIAS = 1.0


def make_lstm(input_size: int, hidden_size: int, num_layers: int = 1) -> nn.LSTM:
    """An LSTM that remembers from the start.

    With PyTorch's own initialisation the forget gates begin near sigmoid(0), and what an LSTM saw
    8 steps ago reaches its output, and the gradient reaches back, times 0.5^8. FORGET_BIAS makes it
    0.73^8, as in the LSTM of the IMPALA paper's program (Jozefowicz et al. 2015).
    """
    lstm = nn.LSTM(input_size, hidden_size, num_layers)
    for name, parameter in lstm.named_parameters():
        if name.startswith("bias_ih"):
            with torch.no_grad():
                _forget_part(parameter).add_(FORGET_BIAS)
    return lstm


def _forget_part(bias: Tensor) -> Tensor:
    """PyTorch's order of gates is input, forget, cell, output."""
    return bias.chunk(4)[1]


def initial_lstm_state(lstm: nn.LSTM, batch_size: int) -> LSTMState:
    """Zeros on the LSTM's device."""
    shape = (lstm.num_layers, batch_size, lstm.hidden_size)
    device = next(lstm.parameters()).device
    return torch.zeros(shape, device=device), torch.zeros(shape, device=device)


def run_lstm(
    lstm: nn.LSTM, features: Tensor, done: Tensor, state: LSTMState
) -> tuple[Tensor, LSTMState]:
    """Outputs [T, B, hidden] of features [T, B, size], and the state after the last row.

    done: bool [T, B]. A column's state is zero before a row where it is true. The rows between two
    such rows are one call, so episodes longer than a rollout cost no loop over time.
    """
    outputs = []
    for start, end in pairwise(_bounds(done)):
        state = _reset(state, done[start])
        output, state = lstm(features[start:end], state)
        outputs.append(output)
    return torch.cat(outputs), state


def _bounds(done: Tensor) -> list[int]:
    """0, the rows after it in which an episode starts, and T."""
    starts = done[1:].any(1).nonzero().flatten() + 1
    return [0, *starts.tolist(), len(done)]


def _reset(state: LSTMState, done: Tensor) -> LSTMState:
    """The state with the columns of done [B] zeroed, whatever they hold: NaN too."""
    ended = done.view(1, -1, 1)
    hidden, cell = state
    return hidden.masked_fill(ended, 0.0), cell.masked_fill(ended, 0.0)
