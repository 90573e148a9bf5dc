# SPDX-License-Identifier: Apache-2.0
"""Weights at the start: orthogonal (Saxe et al. 2014, arXiv 1312.6120), scaled for ReLU.

A game's frames are nearly the same all the time: a ball is a few pixels of 7,000. PyTorch's own
start makes every layer's output smaller than its input, so that after four of them next to nothing
is left of the ball, while what never changes pulls all units the same way, until none responds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

RELU_GAIN = math.sqrt(2.0)  # ReLU halves the mean square
POLICY_GAIN = 0.01  # every action is about as likely as any other
BASELINE_GAIN = 1.0


def orthogonal_(layers: Iterable[nn.Conv2d | nn.Linear], gain: float = RELU_GAIN) -> None:
    """Weights in place: rows (or columns, if those are fewer) of length `gain` at right angles;
    a filter is a row. Biases are 0.
    """
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
