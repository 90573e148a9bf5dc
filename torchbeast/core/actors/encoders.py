# SPDX-License-Identifier: Apache-2.0
"""The torso for each leaf of an observation, chosen by the kind of data that the leaf holds.

    image      see torsos.py
    numbers    [N, *shape]  -> a linear layer, normalised first where their scale is unknown
    one-hot    [N, *shape]  -> one-hot vectors         -> linear
    names      [N, *shape]  -> an embedding per entry  -> linear
    map        [N, H, W]    -> an embedding per cell   -> convolutions
    strings    [N, H, W, L] -> a linear layer over each cell's string -> convolutions

"Names" are categorical integers: glyphs, letters, the number of a state. Their number comes from
the space; a value outside it counts as the nearest one inside. The rules of the choice are in
docs/how-to/observations.md. They use the bounds and categories that the space declares, and dtype
and shape where it declares none. They never depend on observed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.running_norm import RunningNorm
from torchbeast.core.actors.torsos import (
    ImageTorso,
    PreparedTorso,
    ShallowTorso,
    Torso,
    channels_first,
    image_shape,
    is_image,
)
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace

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


class EmbeddingRows(nn.Module):
    """Maps integers [N, *shape] to row indices of an embedding table, int64 [N, *shape].

    apart: every entry has its own rows; otherwise entries with equal counts share rows.
    """

    start: Tensor
    last: Tensor
    offset: Tensor

    def __init__(self, spec: ArraySpec, apart: bool) -> None:
        super().__init__()
        counts, start = counts_of(spec) or ((), ())
        if apart:
            counts *= math.prod(spec.shape) // len(counts)
        self.counts = counts
        offsets = [0, *accumulate(counts)][:-1]
        last = [count - 1 for count in counts]
        for name, numbers in [("start", start), ("offset", offsets), ("last", last)]:
            shape = spec.shape if len(numbers) > 1 else ()
            self.register_buffer(name, torch.tensor(numbers).reshape(shape), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Returns row indices [N, *shape] of values [N, *shape]."""
        inside = (values.long() - self.start).clamp_(min=0)
        return torch.minimum(inside, self.last) + self.offset


class OneHotTorso(Torso):
    """One linear layer with ReLU over the one-hot vectors of all entries.

    Its initial weights are scaled for the number of ones in the input, because zeros add nothing.
    """

    def __init__(self, spec: ArraySpec, size: int) -> None:
        super().__init__()
        self.num_features = size
        self.places = EmbeddingRows(spec, apart=True)
        self.linear = nn.Linear(sum(self.places.counts), size)
        bound = 1 / math.sqrt(max(1, math.prod(spec.shape)))
        for parameter in self.linear.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, frames: Tensor) -> Tensor:
        places = self.places(frames).reshape(frames.shape[0], -1)
        ones = self.linear.weight.new_zeros(frames.shape[0], self.linear.in_features)
        return F.relu(self.linear(ones.scatter_(1, places, 1.0)))


class NamesTorso(Torso):
    """An embedding of each entry, and one linear layer with ReLU over all of them."""

    def __init__(self, spec: ArraySpec, size: int) -> None:
        super().__init__()
        self.num_features = size
        self.places = EmbeddingRows(spec, apart=False)
        self.table = name_table(self.places.counts)
        self.linear = nn.Linear(math.prod(spec.shape) * NAME_SIZE, size)

    def forward(self, frames: Tensor) -> Tensor:
        named = self.table(self.places(frames))
        return F.relu(self.linear(named.reshape(frames.shape[0], -1)))


class MapTorso(Torso):
    """An embedding of each cell, and convolutions that halve the map until it is small.

    Leaves of more dimensions hold several names per cell, whose embeddings are concatenated.
    """

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__()
        channels, height, width = image_shape(spec.shape)
        self.places = EmbeddingRows(spec, apart=False)
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
        ((count,), (self._start,)) = counts_of(spec) or ((1,), (0,))
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


VECTOR_SIZE = 128  # features of a leaf that is neither an image nor a map
FLAT_IMAGE_MINIMUM = 64  # pixels a side; smaller leaves of rank 2 are terminals, maps or tables
ONE_HOT_MAXIMUM = 1024  # entries of all one-hot vectors of a leaf
NAMES_MAXIMUM = 2**16  # distinct values of integers that are treated as names
EMBEDDED_MAXIMUM = 2**14  # entries that get an embedding each
KNOWN_SCALE = 1.0  # numbers with bounds up to this need no normalisation
PIXEL_BOUND = 100.0  # floats with larger bounds are read as tables, unless they are large or gray


class Kind(Enum):
    """The kind of data in a leaf; the values are the words that a run prints at its start."""

    IMAGE = "image"
    ONE_HOT = "one-hot"
    NAMES = "categories"
    MAP = "map of categories"
    STRINGS = "map of strings"
    NUMBERS = "numbers"


def kind_of(spec: ArraySpec) -> Kind:
    """Returns the kind of data in a leaf."""
    if spec.categories is not None and _num_ones(spec) <= ONE_HOT_MAXIMUM:
        return Kind.ONE_HOT
    if _has_names(spec) and not _has_gray_levels(spec):
        return _kind_of_names(spec)
    return Kind.IMAGE if is_image(spec.shape) and _has_pixels(spec) else Kind.NUMBERS


def is_large_image(spec: ArraySpec) -> bool:
    """Returns whether a leaf is an image large enough for a deep network."""
    return kind_of(spec) is Kind.IMAGE and _is_large(spec.shape)


def needs_statistics(spec: ArraySpec) -> bool:
    """Returns whether a leaf holds numbers of unknown scale, to be normalised by running
    statistics: one mean and deviation per entry. One entry of unknown scale suffices, because
    next to it the network would not notice an entry whose values are small.
    """
    if kind_of(spec) not in (Kind.IMAGE, Kind.NUMBERS) or not math.prod(spec.shape):
        return False
    if spec.dtype in ("bool", "uint8") or _has_gray_levels(spec):
        return False
    return not _is_within(spec, KNOWN_SCALE)


def readings(space: ObservationSpace, path: str = "") -> Iterator[tuple[str, ArraySpec, str]]:
    """Yields the leaves of an observation in order: path, spec, and the kind of data in it.

    A path is, for example, camera or pair.0; "" if the observation is a single leaf.
    """
    if isinstance(space, ArraySpec):
        normalised = "normalised " if needs_statistics(space) else ""
        yield path, space, f"{normalised}{kind_of(space).value}"
        return
    entries = sorted(space.items()) if isinstance(space, dict) else enumerate(space)
    for key, entry in entries:
        yield from readings(entry, f"{path}.{key}" if path else str(key))


def torso_for(
    spec: ArraySpec,
    over_images: type[ImageTorso] | None,
    over_numbers: Callable[[tuple[int, ...]], Torso],
) -> Torso:
    """Returns a torso for a leaf.

    over_images: makes the torso of images that are large enough for it; None: images are treated as
    vectors of numbers. over_numbers: makes the torso of these.
    """
    match kind_of(spec):
        case Kind.ONE_HOT:
            return OneHotTorso(spec, VECTOR_SIZE)
        case Kind.NAMES:
            return NamesTorso(spec, VECTOR_SIZE)
        case Kind.MAP:
            return MapTorso(spec)
        case Kind.STRINGS:
            return StringsTorso(spec)
        case Kind.IMAGE if over_images is not None and is_image(spec.shape, over_images.smallest):
            return _prepared(spec, over_images(spec.shape))
    return _prepared(spec, over_numbers(spec.shape))


def _num_ones(spec: ArraySpec) -> int:
    counts = spec.categories or (0,)
    return sum(counts) * (math.prod(spec.shape) // len(counts))


def _has_names(spec: ArraySpec) -> bool:
    """Returns whether a leaf's integers have more than two values and few enough to be names."""
    counts = counts_of(spec)
    return counts is not None and max(counts[0]) > 2 and sum(counts[0]) <= NAMES_MAXIMUM


def _is_large(shape: tuple[int, ...]) -> bool:
    """Returns whether a leaf of this shape has the size of a picture."""
    return is_image(shape, FLAT_IMAGE_MINIMUM if len(shape) == 2 else ShallowTorso.smallest)


def _has_gray_levels(spec: ArraySpec) -> bool:
    """Returns whether a leaf is a picture with values from 0 to 255.

    Small leaves of integers in this range may be categories.
    """
    if (spec.low, spec.high) != (0, 255) or spec.categories is not None:
        return False
    return is_image(spec.shape) if spec.dtype.startswith("float") else _is_large(spec.shape)


def _is_within(spec: ArraySpec, bound: float) -> bool:
    """Returns whether all entries are between -bound and bound; floats without a declared space
    count as such.
    """
    if spec.low is None or spec.high is None:
        return spec.dtype.startswith("float")
    return max(abs(spec.low), abs(spec.high)) <= bound


def _kind_of_names(spec: ArraySpec) -> Kind:
    size, rank = math.prod(spec.shape), len(spec.shape)
    counts, start = counts_of(spec) or ((), ())
    if size <= EMBEDDED_MAXIMUM:
        return Kind.MAP if rank in (2, 3, 4) and min(spec.shape) > 1 else Kind.NAMES
    if rank == 2:
        return Kind.MAP
    return Kind.STRINGS if rank == 3 and len(counts) == len(start) == 1 else Kind.NUMBERS


def _has_pixels(spec: ArraySpec) -> bool:
    """Returns whether a leaf of image shape holds pixels: bytes, binary values, gray levels, or
    floats that are not a table of features.

    The columns of a table, such as a window [time, features], have different scales.
    """
    is_binary = spec.low is not None and spec.low >= 0 and spec.high is not None and spec.high <= 1
    if not spec.dtype.startswith("float"):
        return is_binary or spec.dtype in ("uint8", "bool") or _has_gray_levels(spec)
    is_small = _is_within(spec, PIXEL_BOUND)
    if len(spec.shape) == 2:
        return _has_gray_levels(spec) or (_is_large(spec.shape) and is_small)
    return _has_gray_levels(spec) or _is_large(spec.shape) or is_small


def _scaled(frames: Tensor) -> Tensor:
    return frames.float() * (1 / 255)


def _prepared(spec: ArraySpec, torso: Torso) -> Torso:
    """Adds the scaling that the torso, which only divides bytes by 255, does not do itself."""
    if needs_statistics(spec):
        return PreparedTorso(RunningNorm(spec.shape), torso)
    if _has_gray_levels(spec) and spec.dtype != "uint8":
        return PreparedTorso(_scaled, torso)
    if spec.dtype == "uint8" and spec.high is not None and spec.high <= 1:
        return PreparedTorso(Tensor.float, torso)
    return torso
