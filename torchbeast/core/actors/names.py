# SPDX-License-Identifier: Apache-2.0
"""Torsos for leaves of categorical integers, "names": glyphs, letters, the number of a state.

    one-hot    [N, *shape]  -> one-hot vectors         -> linear
    names      [N, *shape]  -> an embedding per entry  -> linear
    map        [N, H, W]    -> an embedding per cell   -> convolutions
    strings    [N, H, W, L] -> a linear layer over each cell's string -> convolutions

The number of names comes from the space. A value outside the space counts as the nearest one
inside.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.torsos import Torso, channels_first, image_shape
from torchbeast.core.envs.spaces import ArraySpec

NAME_SIZE = 8  # size of the embedding of a name
MOST_CHANNELS = 16  # of an image; a longer dimension holds the letters of a string
_CELLS = 64  # a map is halved until it has at most this many cells
_CHANNELS = (16, 32)  # out of a map's first convolution, and out of the others


def counts_of(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the number of names and the smallest name, each as one number or one per entry.

    Returns None when the space declares neither categories nor finite integer bounds.
    """
    if spec.categories is not None:
        return spec.categories, spec.start
    low, high = spec.low, spec.high
    is_integer = not spec.dtype.startswith(("float", "bool"))
    if not is_integer or low is None or high is None or not math.isfinite(high - low):
        return None
    return (int(high - low) + 1,), (int(low),)


class Places(nn.Module):
    """Maps integers [N, *shape] to row indices of an embedding table, int64 [N, *shape].

    apart: every entry has rows of its own; otherwise entries with equal counts share rows.
    """

    start: Tensor
    last: Tensor
    offset: Tensor

    def __init__(self, spec: ArraySpec, apart: bool) -> None:
        super().__init__()
        counts, start = _given(spec)
        if apart:
            counts *= math.prod(spec.shape) // len(counts)
        self.counts = counts
        offsets = [0, *accumulate(counts)][:-1]
        last = [count - 1 for count in counts]
        for name, numbers in [("start", start), ("offset", offsets), ("last", last)]:
            shape = spec.shape if len(numbers) > 1 else ()
            self.register_buffer(name, torch.tensor(numbers).reshape(shape), persistent=False)

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""
        return sum(self.counts)

    def forward(self, values: Tensor) -> Tensor:
        """Returns row indices [N, *shape] of values [N, *shape]."""
        inside = (values.long() - self.start).clamp_(min=0)
        return torch.minimum(inside, self.last) + self.offset


def _given(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = counts_of(spec)
    if found is None:
        raise ValueError(f"{spec} has no names: its space must say bounds or categories")
    return found


class OneHotTorso(Torso):
    """One linear layer with ReLU over the one-hot vectors of all entries.

    Its initial weights are scaled for the number of ones in the input, because zeros add nothing.
    """

    def __init__(self, spec: ArraySpec, size: int) -> None:
        super().__init__()
        self.num_features = size
        self.places = Places(spec, apart=True)
        self.linear = nn.Linear(self.places.num_rows, size)
        bound = 1 / math.sqrt(max(1, math.prod(spec.shape)))
        for parameter in self.linear.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, frames: Tensor) -> Tensor:
        places = self.places(frames).reshape(len(frames), -1)
        ones = self.linear.weight.new_zeros(len(frames), self.places.num_rows)
        return F.relu(self.linear(ones.scatter_(1, places, 1.0)))


class NamesTorso(Torso):
    """An embedding of each entry, and one linear layer with ReLU over all of them."""

    def __init__(self, spec: ArraySpec, size: int) -> None:
        super().__init__()
        self.num_features = size
        self.places = Places(spec, apart=False)
        self.table = name_table(self.places.counts)
        self.linear = nn.Linear(math.prod(spec.shape) * NAME_SIZE, size)

    def forward(self, frames: Tensor) -> Tensor:
        named = self.table(self.places(frames))
        return F.relu(self.linear(named.reshape(len(frames), -1)))


class MapTorso(Torso):
    """An embedding of each cell, and convolutions that halve the map until it is small.

    Leaves of more dimensions hold several names per cell, whose embeddings are concatenated.
    """

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        channels, height, width = image_shape(spec.shape)
        self.places = Places(spec, apart=False)
        self.table = name_table(self.places.counts)
        self.convs, self.num_features = _halving(channels * NAME_SIZE, height, width)

    def forward(self, frames: Tensor) -> Tensor:
        cells = channels_first(self.places(frames))  # [N, C, H, W]
        named = self.table(cells.permute(0, 2, 3, 1)).flatten(3)
        return _convolved(self.convs, named)


class StringsTorso(Torso):
    """A map of strings: a linear layer with ReLU over each cell's string, then MapTorso's
    convolutions.

    Letters are scaled to [0, 1]; an embedding per letter would be the largest cost of a network.
    Strings lie along the last dimension, unless another has at most MOST_CHANNELS entries.
    """

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        self._lie_last = min(spec.shape) > MOST_CHANNELS
        length, height, width = image_shape(spec.shape)
        if self._lie_last:
            height, width, length = spec.shape
        (count,), (self._start,) = _given(spec)
        self._scale = 1 / max(1, count - 1)
        self.linear = nn.Linear(length, NAME_SIZE)
        self.convs, self.num_features = _halving(NAME_SIZE, height, width)

    def forward(self, frames: Tensor) -> Tensor:
        cells = frames if self._lie_last else channels_first(frames).permute(0, 2, 3, 1)
        scaled = cells.float().sub_(self._start).mul_(self._scale)
        return _convolved(self.convs, F.relu(self.linear(scaled)))


def name_table(counts: tuple[int, ...]) -> nn.Embedding:
    """Returns an embedding table [sum(counts), NAME_SIZE] for names.

    The first element of an embedding is the name's rank, scaled to [-1, 1], so that integers which
    are quantities after all keep their order; the other elements are random.
    """
    table = nn.Embedding(sum(counts), NAME_SIZE)
    with torch.no_grad():
        table.weight.div_(math.sqrt(NAME_SIZE))
        table.weight[:, 0] = torch.cat([torch.linspace(-1, 1, count) for count in counts])
    return table


def _halving(channels: int, height: int, width: int) -> tuple[nn.ModuleList, int]:
    """Returns convolutions of 3x3 that halve the map, and the number of features after the last."""
    out, stride = _CHANNELS[0], 2 if height * width > _CELLS else 1
    convs = nn.ModuleList()
    while not convs or height * width > _CELLS:
        convs.append(nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1))
        height, width = (-(-side // stride) for side in (height, width))
        channels, out = out, _CHANNELS[1]
    return convs, channels * height * width


def _convolved(convs: nn.ModuleList, cells: Tensor) -> Tensor:
    """Returns features [N, num_features] of cells [N, H, W, C]; channels last is fastest."""
    x = cells.permute(0, 3, 1, 2)
    for conv in convs:
        x = F.relu_(conv(x))
    return x.flatten(1)
