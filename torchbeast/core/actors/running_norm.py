# SPDX-License-Identifier: Apache-2.0
"""Normalisation of numbers of unknown scale by running mean and variance.

The statistics are buffers of the model: they travel with its weights to the actors and into
checkpoints. Only the learner updates them, once per batch (`Actor.observe`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

LIMIT = 10.0  # largest magnitude of a normalised number
SMALLEST_VARIANCE = 1e-8  # keeps a constant input at 0


class Moments(NamedTuple):
    """Number, mean and variance of rows of numbers."""

    rows: Tensor  # int64 []: how many
    mean: Tensor  # float64 [*entries]
    variance: Tensor  # float64 [*entries]

    def merged(self, other: Moments) -> Moments:
        """Returns the moments of both together (Chan, Golub, LeVeque 1979); one has rows."""
        before, added = self.rows, other.rows
        total = before + added
        apart = other.mean - self.mean
        squares = (
            self.variance * before + other.variance * added + apart**2 * before * added / total
        )
        return Moments(total, self.mean + apart * added / total, squares / total)

    def without(self, part: Moments) -> Moments:
        """Returns the moments of the rest, if `part` was merged with it."""
        rows = self.rows - part.rows
        if not rows:
            return Moments(rows, torch.zeros_like(self.mean), torch.zeros_like(self.variance))
        apart = (self.mean - part.mean) * self.rows / rows
        squares = self.variance * self.rows - part.variance * part.rows
        squares = squares - apart**2 * part.rows * rows / self.rows
        return Moments(rows, part.mean + apart, (squares / rows).clamp(min=0.0))


class RunningNorm(nn.Module):
    """Normalises x to (x - mean) / standard deviation, clipped to [-LIMIT, LIMIT].

    Each entry has its own mean and deviation, computed from all values observed so far. Before the
    first observation x is only clipped.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        entries = shape or (1,)
        # float64, because float32 cannot represent consecutive large integers.
        self.register_buffer("mean", torch.zeros(entries, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(entries, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """Returns values [N, *shape] of any dtype normalised, as float32 [N, *shape]."""
        deviation = self.variance.clamp(min=SMALLEST_VARIANCE).sqrt()
        return ((values - self.mean) / deviation).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Adds values [N, *shape] to the running mean and variance."""
        rows = values.double().reshape(-1, *self.mean.shape)
        variance, mean = torch.var_mean(rows, 0, correction=0)
        count = torch.full_like(self.count, len(rows))
        self.set_moments(self.moments().merged(Moments(count, mean, variance)))

    def moments(self) -> Moments:
        """Returns a copy of the statistics."""
        return Moments(self.count.clone(), self.mean.clone(), self.variance.clone())

    def set_moments(self, moments: Moments) -> None:
        """Replaces the statistics."""
        for buffer, value in zip((self.count, self.mean, self.variance), moments, strict=True):
            buffer.copy_(value)
