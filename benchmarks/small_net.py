# SPDX-License-Identifier: Apache-2.0
"""Sample Factory's networks for 84x84 images, and one that costs almost nothing.

Use them by --model small_net:SmallConvNet, small_net:ThreeConvNet or small_net:OneLayerNet.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.networks import TorsoActorCritic, make_core
from torchbeast.core.actors.torsos import BlockConv2d, ShallowTorso, Torso, as_images, image_shape
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.spaces import ActionSpace, ObservationSpace


class TwoConvolutions(Torso):
    """Two convolutions: 16 of 8x8 by 4 and 32 of 4x4 by 2, ReLU after each."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_shape(shape)
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=8, stride=4)
        self.conv2 = BlockConv2d(16, 32, kernel_size=4, stride=2)
        self.num_features = 32 * _size_after(height) * _size_after(width)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu_(self.conv1(as_images(frames)))
        return F.relu_(self.conv2(x)).flatten(1)


class SmallConvNet(TorsoActorCritic):
    """Two convolutions and a layer of 256, with an optional LSTM of 256 units, one layer."""

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, use_lstm: bool
    ) -> None:
        torsos = [TwoConvolutions(leaf.shape) for leaf in flatten(observation_space)]
        super().__init__(torsos, action_space, fc_size=256, sees_last_action=False)
        self._add_heads(make_core("lstm", self._core_input_size, 256) if use_lstm else None)


class ThreeConvNet(TorsoActorCritic):
    """Three convolutions and a layer of 512, with an optional LSTM of 512 units, one layer."""

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, use_lstm: bool
    ) -> None:
        torsos = [ShallowTorso(leaf.shape) for leaf in flatten(observation_space)]
        super().__init__(torsos, action_space, fc_size=512, sees_last_action=False)
        self._add_heads(make_core("lstm", self._core_input_size, 512) if use_lstm else None)


class EveryTwelfthPixel(Torso):
    """A few pixels of each channel, without weights."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_shape(shape)
        self.num_features = channels * -(-height // 12) * -(-width // 12)

    def forward(self, frames: Tensor) -> Tensor:
        return (frames[..., ::12, ::12].float() / 255).flatten(1)


class OneLayerNet(TorsoActorCritic):
    """A layer of 32 over a few pixels: what is left of a step's cost is TorchBeast's own."""

    def __init__(
        self, observation_space: ObservationSpace, action_space: ActionSpace, use_lstm: bool
    ) -> None:
        torsos = [EveryTwelfthPixel(leaf.shape) for leaf in flatten(observation_space)]
        super().__init__(torsos, action_space, fc_size=32, sees_last_action=False)
        self._add_heads(None)


def _size_after(size: int) -> int:
    """Returns the size of an image's side after both convolutions."""
    return ((size - 8) // 4 + 1 - 4) // 2 + 1
