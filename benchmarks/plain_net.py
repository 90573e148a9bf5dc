# SPDX-License-Identifier: Apache-2.0
"""A plain NormedAtariNet without its optimisations, to compare learning curves.

Images are stored channels first, and convolutions are nn.Conv2d. Use it by
`--model plain_net:PlainAtariNet`; with --megabytes_at_once 0, --torch_threads 1 and --precision
float32 one thread learns from whole batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.networks import BuiltInNet
from torchbeast.core.actors.torsos import ImageTorso


class PlainTorso(ImageTorso):
    """Three convolutions over images that are standardised to mean 0 and variance 1."""

    def _build(self, channels: int) -> None:
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=1)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.float()
        variance, mean = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1.0)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return x.flatten(1)


class PlainAtariNet(BuiltInNet):
    """A network for frames [channels, 84, 84].

    With the same seed it has the initial weights of NormedAtariNet, if it has no LSTM.
    """

    over_images = PlainTorso
    width = 512
    is_orthogonal = True
