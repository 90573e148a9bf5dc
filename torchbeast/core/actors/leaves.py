# SPDX-License-Identifier: Apache-2.0
"""Choice of the torso for each leaf of an observation, by the kind of data it holds.

The rules are in docs/observations.md. They use the bounds and categories that the environment's
space declares, and dtype and shape where it declares none. They never depend on observed values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from torch import Tensor, nn

from torchbeast.core.actors.names import (
    MapTorso,
    NamesTorso,
    OneHotTorso,
    StringsTorso,
    counts_of,
)
from torchbeast.core.actors.running_norm import RunningNorm
from torchbeast.core.actors.torsos import SHALLOW_MINIMUM, Torso, VectorTorso, is_image
from torchbeast.core.envs.spaces import ArraySpec

VECTOR_SIZE = 128  # features of a leaf that is neither an image nor a map
FLAT_IMAGE_MINIMUM = 64  # pixels a side; smaller leaves of rank 2 are terminals, maps or tables
ONE_HOT_MAXIMUM = 1024  # entries of all one-hot vectors of a leaf
NAMES_MAXIMUM = 2**16  # distinct values of integers that are treated as names
EMBEDDED_MAXIMUM = 2**14  # entries that get an embedding each
KNOWN_SCALE = 100.0  # numbers with bounds up to this need no normalisation


class Kind(Enum):
    """The kind of data in a leaf; the values are the words that a run prints at its start."""

    IMAGE = "image"
    ONE_HOT = "one-hot"
    NAMES = "names"
    MAP = "map of names"
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
    statistics.
    """
    if kind_of(spec) not in (Kind.IMAGE, Kind.NUMBERS) or not math.prod(spec.shape):
        return False
    return not (spec.dtype in ("bool", "uint8") or _has_gray_levels(spec) or _has_known_scale(spec))


def over_vectors(shape: tuple[int, ...]) -> Torso:
    """Returns the usual torso of numbers."""
    return VectorTorso(shape, VECTOR_SIZE)


def torso_for(
    spec: ArraySpec,
    over_images: Callable[[tuple[int, ...]], Torso] | None,
    smallest: int = 1,
    over_numbers: Callable[[tuple[int, ...]], Torso] = over_vectors,
) -> Torso:
    """Returns a torso for a leaf.

    over_images: makes the torso of images of at least `smallest` pixels a side; None: images are
    treated as vectors of numbers. over_numbers: makes the torso of these.
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
        case Kind.IMAGE if over_images is not None and is_image(spec.shape, smallest):
            return _prepared(spec, over_images(spec.shape))
    return _prepared(spec, over_numbers(spec.shape))


def _num_ones(spec: ArraySpec) -> int:
    counts = spec.categories or (0,)
    return sum(counts) * (math.prod(spec.shape) // len(counts))


def _has_names(spec: ArraySpec) -> bool:
    """Returns whether a leaf's integers have more than two values and few enough to be names."""
    found = counts_of(spec)
    return found is not None and max(found[0]) > 2 and sum(found[0]) <= NAMES_MAXIMUM


def _is_large(shape: tuple[int, ...]) -> bool:
    """Returns whether a leaf of this shape has the size of a picture."""
    return is_image(shape, FLAT_IMAGE_MINIMUM if len(shape) == 2 else SHALLOW_MINIMUM)


def _has_gray_levels(spec: ArraySpec) -> bool:
    """Returns whether a leaf is a picture with values from 0 to 255.

    Small leaves of such integers may be names.
    """
    if (spec.low, spec.high) != (0, 255) or spec.categories is not None:
        return False
    return is_image(spec.shape) if spec.dtype.startswith("float") else _is_large(spec.shape)


def _has_known_scale(spec: ArraySpec) -> bool:
    """Returns whether a leaf's numbers can be used unscaled: small ones, and floats without a
    declared space.
    """
    if spec.low is None or spec.high is None:
        return spec.dtype.startswith("float")
    return max(abs(spec.low), abs(spec.high)) <= KNOWN_SCALE


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

    The columns of a table, such as a window [time, features], have scales of their own.
    """
    is_binary = spec.low is not None and spec.low >= 0 and spec.high is not None and spec.high <= 1
    if not spec.dtype.startswith("float"):
        return is_binary or spec.dtype in ("uint8", "bool") or _has_gray_levels(spec)
    if len(spec.shape) == 2:
        return _has_gray_levels(spec) or (_is_large(spec.shape) and _has_known_scale(spec))
    return _has_gray_levels(spec) or _is_large(spec.shape) or _has_known_scale(spec)


class PreparedTorso(Torso):
    """A torso that scales or normalises its leaf first."""

    def __init__(self, scale: nn.Module, torso: Torso) -> None:
        super().__init__()
        self.scale = scale
        self.torso = torso
        self.num_features = torso.num_features

    def forward(self, frames: Tensor) -> Tensor:
        features: Tensor = self.torso(self.scale(frames))
        return features

    def observe(self, frames: Tensor) -> None:
        if isinstance(self.scale, RunningNorm):
            self.scale.observe(frames)


class _Scale(nn.Module):
    """Converts numbers to float32 and multiplies them by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, frames: Tensor) -> Tensor:
        return frames.float() * self._factor


def _prepared(spec: ArraySpec, torso: Torso) -> Torso:
    """Adds the scaling that the torso, which only divides bytes by 255, does not do itself."""
    if needs_statistics(spec):
        return PreparedTorso(RunningNorm(spec.shape), torso)
    if _has_gray_levels(spec) and spec.dtype != "uint8":
        return PreparedTorso(_Scale(1 / 255), torso)
    if spec.dtype == "uint8" and spec.high is not None and spec.high <= 1:
        return PreparedTorso(_Scale(1.0), torso)
    return torso
