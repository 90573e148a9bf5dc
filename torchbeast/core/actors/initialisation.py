# SPDX-License-Identifier: Apache-2.0
"""Orthogonal initialisation of weights (Saxe et al. 2014, arXiv 1312.6120), scaled for ReLU.

The frames of a game are nearly constant: a ball is a few pixels of 7,000. With PyTorch's default
initialisation every layer's output is smaller than its input, so that after four layers almost
nothing is left of the ball, while the constant background pushes all units in the same direction,
until none responds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

RELU_GAIN = math.sqrt(2.0)  # makes up for ReLU, which halves the mean square
POLICY_GAIN = 0.01  # makes all actions about equally likely
BASELINE_GAIN = 1.0


def orthogonal_(layers: Iterable[nn.Conv2d | nn.Linear], gain: float = RELU_GAIN) -> None:
    """Initialises layers in place: orthogonal weights scaled by `gain`, biases 0.

    Rows, or columns where those are fewer, are orthogonal and of length `gain`; a convolution's
    filter is a row.
    """
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
