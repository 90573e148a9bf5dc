# SPDX-License-Identifier: Apache-2.0
"""Amounts of unknown scale, brought to mean 0 and variance 1 by what was observed so far.

The statistics are buffers of the model: they travel with its weights to whoever acts, and into
checkpoints. Only the learner changes them, once for each batch (`ActorCritic.observe`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LIMIT = 10.0  # of a normalised number
_SMALLEST_VARIANCE = 1e-8  # a number that never changes is 0


class RunningNorm(nn.Module):
    """(x - mean) / deviation of all x observed so far, in [-LIMIT, LIMIT].

    Each entry of a vector has statistics of its own; a leaf of two and more dimensions has one for
    all, so that what looks alike in two places stays alike. Before anything was observed x is only
    limited.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        entries = shape if len(shape) == 1 else (1,)
        # float64: float32 cannot tell one large integer from the next.
        self.register_buffer("mean", torch.zeros(entries, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(entries, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """[N, *shape] of any dtype to float32 [N, *shape]."""
        deviation = self.variance.clamp(min=_SMALLEST_VARIANCE).sqrt()
        return ((values - self.mean) / deviation).clamp(-LIMIT, LIMIT).float()

    @torch.no_grad()
    def observe(self, values: Tensor) -> None:
        """Counts values [N, *shape]: mean and variance are then those of all values ever counted
        (Chan, Golub and LeVeque 1979).
        """
        rows = values.double().reshape(-1, len(self.mean))
        before, added = self.count, len(rows)
        total = before + added
        variance, mean = torch.var_mean(rows, 0, correction=0)
        apart = mean - self.mean
        squares = self.variance * before + variance * added + apart**2 * before * added / total
        self.variance.copy_(squares / total)
        self.mean.add_(apart * added / total)
        self.count.copy_(total)
