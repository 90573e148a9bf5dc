# SPDX-License-Identifier: Apache-2.0
"""Normalisation of numbers of unknown scale by running mean and variance.

The statistics are buffers of the model: they travel with its weights to the actors and into
checkpoints. Only the learner updates them, once per batch (`ActorCritic.observe`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIMIT = 10.0  # largest magnitude of a normalised number
_SMALLEST_VARIANCE = 1e-8  # keeps a constant input at 0


class RunningNorm(nn.Module):
    """Normalises x to (x - mean) / standard deviation, clipped to [-LIMIT, LIMIT].

    Mean and deviation are those of all values observed so far. Each entry of a vector has its own
    statistics; the entries of a leaf of higher rank share theirs, so that equal values in different
    places stay equal. Before the first observation x is only clipped.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        entries = shape if len(shape) == 1 else (1,)
        # float64, because float32 cannot represent consecutive large integers.
        self.register_buffer("mean", torch.zeros(entries, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(entries, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """Returns values [N, *shape] of any dtype normalised, as float32 [N, *shape]."""
        deviation = self.variance.clamp(min=_SMALLEST_VARIANCE).sqrt()
        return ((values - self.mean) / deviation).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Adds values [N, *shape] to the running mean and variance (Chan, Golub, LeVeque 1979)."""
        rows = values.double().reshape(-1, len(self.mean))
        before, added = self.count, len(rows)
        total = before + added
        variance, mean = torch.var_mean(rows, 0, correction=0)
        apart = mean - self.mean
        squares = self.variance * before + variance * added + apart**2 * before * added / total
        self.variance.copy_(squares / total)
        self.mean.add_(apart * added / total)
        self.count.copy_(total)
