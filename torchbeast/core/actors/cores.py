# SPDX-License-Identifier: Apache-2.0
"""Recurrent cores: LSTM, GRU, and the gated transformer-XL, whose memory is the last embeddings.

A core maps features [T, B, input_size] to outputs [T, B, hidden], and the state before the first
row to the state after the last one. Where an episode begins, a column's state is zeroed first.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.base.specs import check_kwarg

FORGET_BIAS = 1.0
GATE_BIAS = 2.0  # a new gate passes on nine tenths of x: almost the identity, as the paper wants
NUM_HEADS = 4


class GatedTransformerXL(nn.Module):
    """The gated transformer-XL, GTrXL (Parisotto et al. 2019, arXiv 1910.06764).

    In each layer a row attends to itself and to the `length` rows before it in its episode:

        Y = relu(attention(LayerNorm([memory, E])))      E' = gate(E, Y)
        Z = relu(mlp(LayerNorm(E')))                     next E = gate(E', Z)

    with the relative positions of Dai et al. 2019 (arXiv 1901.02860, section 3.3). So the last row
    depends on layers * length rows before it. A whole unroll is one forward, equal to one row at a
    time. No gradient flows to rows before the unroll.

    The state is (memory, age): the inputs of each layer in the last rows [layers * length, B,
    hidden], oldest first, and the number of these rows that belong to the episode [1, B, 1].
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.hidden_size, self.length = hidden_size, length
        self.embedding = nn.Linear(input_size, hidden_size)
        self.layers = nn.ModuleList(_GatedLayer(hidden_size, length) for _ in range(num_layers))

    def forward(
        self, features: Tensor, done: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns outputs [T, B, hidden] and the state after the last row; see run_core.

        One NaN in the features makes every row of its column NaN, also rows of other episodes.
        """
        memory, age = state
        num_rows, length = len(features), self.length
        rows_ago = torch.arange(length, 0, -1, device=done.device).view(-1, 1, 1)
        is_known = (rows_ago <= age) & ~done[:1].unsqueeze(-1)  # [length, B, 1]
        memory = memory.masked_fill(~is_known.repeat(len(self.layers), 1, 1), 0.0)  # may hold NaN
        # The number of the episode of each row in the memory and the unroll, [length + T, B].
        episodes = done.long().cumsum(0)
        episodes = torch.cat([torch.where(is_known.squeeze(-1), episodes[:1], -1), episodes])
        time = torch.arange(length + num_rows, device=done.device)
        distance = time[length:].unsqueeze(1) - time  # [T, length + T]
        is_near = (distance >= 0) & (distance <= length)
        attends = is_near.unsqueeze(-1) & (episodes[length:].unsqueeze(1) == episodes)
        distance = distance.clamp(0, length)
        embeddings, memories = self.embedding(features), []
        for layer, before in zip(self.layers, memory.chunk(len(self.layers)), strict=True):
            rows = torch.cat([before, embeddings])
            memories.append(rows[num_rows:])
            embeddings = layer(rows, distance, attends)
        is_known = (episodes[num_rows:] == episodes[-1]).unsqueeze(-1)
        after = torch.cat(memories).masked_fill(~is_known.repeat(len(self.layers), 1, 1), 0.0)
        return embeddings, (after, is_known.sum(0, keepdim=True).to(age.dtype))


class _GatedLayer(nn.Module):
    """Attention and a network of two layers, each after a LayerNorm and before a gate."""

    positions: Tensor  # [length + 1, hidden], of the distances 0, 1, ...

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.query = nn.Linear(size, size, bias=False)
        self.keys_values = nn.Linear(size, 2 * size, bias=False)
        self.position_keys = nn.Linear(size, size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(size))
        self.position_bias = nn.Parameter(torch.zeros(size))
        self.heads_joined = nn.Linear(size, size, bias=False)
        self.attention_gate = _Gate(size)
        self.mlp = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)
        )
        self.mlp_gate = _Gate(size)
        angles = torch.arange(length + 1.0).unsqueeze(1) / torch.logspace(0, 4, size // 2)
        positions = torch.cat([angles.sin(), angles.cos()], -1)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, rows: Tensor, distance: Tensor, attends: Tensor) -> Tensor:
        """Returns the next layer's inputs [T, B, size].

        rows: [S, B, size], the last T of which are the unroll's. distance: [T, S], of each of these
        to each row. attends: [T, S, B], whether it may see it.
        """
        x = rows[-len(distance) :]
        x = self.attention_gate(x, F.relu(self._attention(self.norm(rows), distance, attends)))
        return self.mlp_gate(x, F.relu(self.mlp(x)))

    def _attention(self, rows: Tensor, distance: Tensor, attends: Tensor) -> Tensor:
        num_rows, batch = len(distance), rows.shape[1]

        def by_head(values: Tensor) -> Tensor:
            return values.view(*values.shape[:-1], NUM_HEADS, -1)

        query = self.query(rows[-num_rows:])
        keys, values = map(by_head, self.keys_values(rows).chunk(2, -1))
        of_content = torch.einsum("tbhd,sbhd->bhts", by_head(query + self.content_bias), keys)
        positions = by_head(self.position_keys(self.positions))
        of_distance = torch.einsum(
            "tbhd,nhd->bhtn", by_head(query + self.position_bias), positions
        ).gather(-1, distance.expand(batch, NUM_HEADS, -1, -1))
        scores = (of_content + of_distance) / math.sqrt(keys.shape[-1])
        scores = scores.masked_fill(~attends.permute(2, 0, 1).unsqueeze(1), -torch.inf)
        seen = torch.einsum("bhts,sbhd->tbhd", scores.softmax(-1), values)
        return self.heads_joined(seen.flatten(2))


class _Gate(nn.Module):
    """The GRU-type gate of the paper's section 3.2, which chooses between x and y.

    r = sigmoid(Wr y + Ur x),  z = sigmoid(Wz y + Uz x - GATE_BIAS),  h = tanh(Wh y + Uh (r x)):
    (1 - z) x + z h.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_y = nn.Linear(size, 3 * size, bias=False)
        self.of_x = nn.Linear(size, 2 * size, bias=False)
        self.of_reset = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.full((size,), -GATE_BIAS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns [T, B, size] of two such tensors."""
        reset_y, update_y, new_y = self.of_y(y).chunk(3, -1)
        reset_x, update_x = self.of_x(x).chunk(2, -1)
        reset = torch.sigmoid(reset_y + reset_x)
        update = torch.sigmoid(update_y + update_x + self.bias)
        return torch.lerp(x, torch.tanh(new_y + self.of_reset(reset * x)), update)


Core = nn.LSTM | nn.GRU | GatedTransformerXL


def make_core(
    kind: str, input_size: int, hidden_size: int, num_layers: int, length: int, usual: bool = False
) -> Core:
    """Returns an "lstm", "gru" or "gtrxl"; raises SpecError for another kind.

    The forget gates of an LSTM are biased to remember (Jozefowicz et al. 2015). With PyTorch's
    initialisation they start near sigmoid(0), so that an input of 8 steps ago, and the gradient
    back to it, is scaled by 0.5^8. FORGET_BIAS makes that 0.73^8, as in the LSTM of the IMPALA
    paper's program.

    length: rows in the memory of a gtrxl. usual: leave PyTorch's initialisation of an LSTM as it
    is.
    """
    check_kwarg(kind in ("lstm", "gru", "gtrxl"), "core", "lstm, gru or gtrxl", kind)
    if kind == "gtrxl":
        are_heads = hidden_size % NUM_HEADS == 0
        check_kwarg(are_heads, "hidden", f"a multiple of {NUM_HEADS} for a gtrxl", hidden_size)
        return GatedTransformerXL(input_size, hidden_size, num_layers, length)
    core = (nn.GRU if kind == "gru" else nn.LSTM)(input_size, hidden_size, num_layers)
    for name, parameter in core.named_parameters():
        if kind == "lstm" and not usual and name.startswith("bias_ih"):
            with torch.no_grad():
                parameter.chunk(4)[1].add_(FORGET_BIAS)  # of the gates input, forget, cell, output
    return core


def initial_core_state(core: Core, batch_size: int) -> Nest[Tensor]:
    """Returns a state of zeros on the core's device: hidden and cell [layers, B, hidden] of an
    LSTM, one tensor of a GRU, an empty memory of a GatedTransformerXL.
    """
    device = next(core.parameters()).device
    if isinstance(core, GatedTransformerXL):
        rows = len(core.layers) * core.length
        memory = torch.zeros(rows, batch_size, core.hidden_size, device=device)
        return memory, memory.new_zeros(1, batch_size, 1)
    hidden = torch.zeros(core.num_layers, batch_size, core.hidden_size, device=device)
    return hidden if isinstance(core, nn.GRU) else (hidden, hidden.clone())


def run_core(
    core: Core, features: Tensor, done: Tensor, state: Nest[Tensor]
) -> tuple[Tensor, Nest[Tensor]]:
    """Runs a core over T rows; returns outputs [T, B, hidden] and the state after the last row.

    features: [T, B, input_size].
    done: bool [T, B]; a column's state is zeroed before each row where it is true.
    state: before row 0, leaves [n, B, ...] as initial_core_state returns them.

    An LSTM or GRU runs all rows between two resets in one call, which is faster than a call for
    each row.
    """
    if isinstance(core, GatedTransformerXL):
        return core(features, done, state)
    outputs = []
    for start, end in pairwise(_bounds(done)):
        ended = done[start].view(1, -1, 1)  # masked_fill, because the state may hold NaN
        state = map_leaves(partial(Tensor.masked_fill, mask=ended, value=0.0), state)
        output, state = core(features[start:end], state)
        outputs.append(output)
    return torch.cat(outputs), state


def _bounds(done: Tensor) -> list[int]:
    """Returns 0, every later row in which an episode starts, and T."""
    if len(done) == 1:  # acting, and torch.export, which cannot trace a number of resets
        return [0, 1]
    starts = done[1:].any(1).nonzero().flatten() + 1
    return [0, *starts.tolist(), len(done)]
