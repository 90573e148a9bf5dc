# SPDX-License-Identifier: Apache-2.0
"""Torsos of leaves whose integers are names, not amounts: glyphs, letters, a state's number.

    one-hot    [N, *shape]  -> ones and zeros          -> linear
    names      [N, *shape]  -> a vector for each entry -> linear
    map        [N, H, W]    -> a vector for each cell  -> convolutions
    strings    [N, H, W, L] -> a linear layer over each cell's string -> convolutions

Counts come from the space. A value outside it counts as the nearest inside.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.torsos import Torso, channels_first, image_shape
from torchbeast.core.envs.spaces import ArraySpec

NAME_SIZE = 8  # of the vector that stands for a name
MOST_CHANNELS = 16  # of an image: more are the letters of a string
_CELLS = 64  # a map is halved until it has at most so many
_CHANNELS = (16, 32)  # of a map's first convolution and of the others


def counts_of(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How many names entries have and which is the first, each for all entries or one for each;
    None where the space names nothing.
    """
    if spec.categories is not None:
        return spec.categories, spec.start
    low, high = spec.low, spec.high
    is_integer = not spec.dtype.startswith(("float", "bool"))
    if not is_integer or low is None or high is None or not math.isfinite(high - low):
        return None
    return (int(high - low) + 1,), (int(low),)


class Places(nn.Module):
    """Which row of a table each entry's value is: integers [N, *shape] to int64 of that shape.

    apart: every entry has rows of its own; else entries with equal counts share them.
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
        """Rows of the table."""
        return sum(self.counts)

    def forward(self, values: Tensor) -> Tensor:
        """[N, *shape] to [N, *shape]."""
        inside = (values.long() - self.start).clamp_(min=0)
        return torch.minimum(inside, self.last) + self.offset


def _given(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = counts_of(spec)
    if found is None:
        raise ValueError(f"{spec} has no names: its space must say bounds or categories")
    return found


class OneHotTorso(Torso):
    """One linear layer with ReLU over the one-hot vectors of all entries.

    It starts as large as a layer whose inputs are the ones alone: zeros add nothing.
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
    """A vector for each entry's name, and one linear layer with ReLU over all of them."""

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
    """A vector for each cell's name, and convolutions that halve the map until it is small.

    Leaves of three dimensions name several things in each cell: their vectors are joined.
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
    """A map of strings: the numbers of a cell, scaled to [0, 1], go through one linear layer with
    ReLU, then all as in MapTorso. A vector for every letter would cost the most of a network.

    Strings lie along the last dimension, unless another is shorter than MOST_CHANNELS.
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
    """Vectors for names. The first number of each is its place among the others, from -1 to 1, so
    that integers which are amounts after all are not only named; the others are random and together
    as large.
    """
    table = nn.Embedding(sum(counts), NAME_SIZE)
    with torch.no_grad():
        table.weight.div_(math.sqrt(NAME_SIZE))
        table.weight[:, 0] = torch.cat([torch.linspace(-1, 1, count) for count in counts])
    return table


def _halving(channels: int, height: int, width: int) -> tuple[nn.ModuleList, int]:
    """Convolutions of 3x3, and the number of features that leave the last."""
    out, stride = _CHANNELS[0], 2 if height * width > _CELLS else 1
    convs = nn.ModuleList()
    while not convs or height * width > _CELLS:
        convs.append(nn.Conv2d(channels, out, kernel_size=3, stride=stride, padding=1))
        height, width = (-(-side // stride) for side in (height, width))
        channels, out = out, _CHANNELS[1]
    return convs, channels * height * width


def _convolved(convs: nn.ModuleList, cells: Tensor) -> Tensor:
    """Features [N, num_features] of cells [N, H, W, C], which are fastest with C last."""
    x = cells.permute(0, 3, 1, 2)
    for conv in convs:
        x = F.relu_(conv(x))
    return x.flatten(1)
