# SPDX-License-Identifier: Apache-2.0
"""Sample Factory's networks for 84x84 images, and one that costs almost nothing.

Use them by --model small_net:SmallConvNet, small_net:ThreeConvNet or small_net:OneLayerNet.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.networks import BuiltInNet
from torchbeast.core.actors.torsos import BlockConv2d, ImageTorso, ShallowTorso, as_images


class TwoConvolutions(ImageTorso):
    """Two convolutions: 16 of 8x8 by 4 and 32 of 4x4 by 2, ReLU after each."""

    smallest = 20  # smaller images vanish under the strides

    def _build(self, channels: int) -> None:
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=8, stride=4)
        self.conv2 = BlockConv2d(16, 32, kernel_size=4, stride=2)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu_(self.conv1(as_images(frames)))
        return F.relu_(self.conv2(x)).flatten(1)


class SmallConvNet(BuiltInNet):
    """Two convolutions and a layer of 256, with an optional LSTM of 256 units, one layer."""

    over_images = TwoConvolutions
    width = 256
    with_last_action = False


class ThreeConvNet(BuiltInNet):
    """Three convolutions and a layer of 512, with an optional LSTM of 512 units, one layer."""

    over_images = ShallowTorso
    width = 512
    with_last_action = False


class EveryTwelfthPixel(ImageTorso):
    """A few pixels of each channel, without weights."""

    def _build(self, channels: int) -> None:
        """Adds nothing."""

    def forward(self, frames: Tensor) -> Tensor:
        return (frames[..., ::12, ::12].float() / 255).flatten(1)


class OneLayerNet(BuiltInNet):
    """A layer of 32 over a few pixels: what is left of a step's cost is TorchBeast's own."""

    over_images = EveryTwelfthPixel
    width = 32
    with_last_action = False
