# SPDX-License-Identifier: Apache-2.0
"""Torsos: networks from one observation leaf, frames [N, *shape], to features [N, num_features].

Inputs become float32: uint8 is divided by 255, every other dtype is used unscaled;
NormedShallowTorso standardises its images instead. Leaves of two dimensions are images of one
channel. Leaves of three dimensions are images with channels first or last: height and width are the
neighbours whose smaller one is the largest. Leaves of four dimensions are stacks of images, which
become channels of one image: [S, H, W, C] and [S, C, H, W] are seen as [S * C, H, W].

Images are stored channels last in memory, whatever their shape: that makes training convolutions of
few channels twice as fast. The order of weights and features does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchbeast.core.actors.running_norm import RunningNorm

Activation = Callable[[Tensor], Tensor]


def as_float(frames: Tensor) -> Tensor:
    """Returns frames of any shape as float32; uint8 is scaled to [0, 1]."""
    if frames.dtype == torch.uint8:
        return frames.float().div_(255.0)
    return frames.float()


def as_images(frames: Tensor) -> Tensor:
    """Returns frames [N, *shape] as float32 images [N, channels, height, width].

    They are stored channels last in memory.
    """
    return as_float(_channels_last(frames))


def as_standard_images(frames: Tensor) -> Tensor:
    """Returns images like `as_images`, each standardised to mean 0 and variance 1 over its values.

    A uniform image becomes 0. A background that never changes would push all weights of a filter in
    the same direction at every update, until the filter never responds again; at 0 it does not.
    """
    values = _channels_last(frames).float().permute(0, 2, 3, 1)  # the order in memory
    level_of_gray = 1.0 if frames.dtype == torch.uint8 else 1 / 255
    standard = F.layer_norm(values, values.shape[1:], eps=level_of_gray**2)
    return standard.permute(0, 3, 1, 2)


def is_image(shape: tuple[int, ...], smallest: int = 1) -> bool:
    """Returns whether a leaf of this shape is an image at least `smallest` pixels high and wide."""
    return len(shape) in (2, 3, 4) and min(image_shape(shape)[1:]) >= smallest


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns channels, height and width of a leaf of two to four dimensions."""
    first = _height_of(shape)
    channels = math.prod(shape[:first]) * math.prod(shape[first + 2 :])
    return channels, shape[first], shape[first + 1]


def channels_first(frames: Tensor) -> Tensor:
    """Returns frames [N, *shape] as [N, channels, height, width], a view where one is possible."""
    first = 1 + _height_of(frames.shape[1:])
    if first + 2 == frames.dim():
        return frames.unsqueeze(1).flatten(1, -3)
    pixels = frames.movedim((first, first + 1), (1, 2))
    return pixels.flatten(3).permute(0, 3, 1, 2)


def _channels_last(frames: Tensor) -> Tensor:
    """Returns frames [N, *shape] as [N, channels, height, width], channels last in memory.

    Called before bytes become floats, when a quarter of the memory has to move.
    """
    images = channels_first(frames)
    if frames.device.type != "cpu" or images.is_contiguous(memory_format=torch.channels_last):
        return images.contiguous(memory_format=torch.channels_last)
    # Takes half the time of `contiguous` for the few channels of frames.
    return torch.stack(images.unbind(1), -1).permute(0, 3, 1, 2)


def _height_of(shape: tuple[int, ...]) -> int:
    """Returns the dimension of an image's height, which the width follows.

    They are the two neighbours whose smaller is the largest; of several such pairs the one closest
    to a square, and of several as square, as in a cube, the first. The others hold channels.
    """
    pairs = [(min(pair), -max(pair)) for pair in pairwise(shape)]
    return pairs.index(max(pairs))


class BlockConv2d(nn.Conv2d):
    """An nn.Conv2d without padding, whose stride divides its kernel size.

    On a CPU it is computed as an unstrided convolution over blocks of pixels:

        image, 1 channel      blocks, 4 channels

         a b | c d
         e f | g h             abef  cdgh            filter 4x4 by 2  =  filter 2x2 by 1
         ----+----      -->
         i j | k l             ijmn  klop
         m n | o p

    The products are the same, but more of them are adjacent in memory: with AVX-512 the second
    convolution of AtariNet takes two thirds of the time, forward and backward. Moving the pixels
    costs a fifth of what that saves; with the few channels of a frame it would cost all of it.

    It has the weights of nn.Conv2d, under the same names; results agree up to rounding. On other
    devices than the CPU it computes exactly as nn.Conv2d does.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, out_channels, (H - kernel_size) // stride + 1, ...]."""
        if input.device.type != "cpu":
            return super().forward(input)
        stride = self.stride[0]
        height, width = (side - side % stride for side in input.shape[2:])  # no filter covers more
        blocks = blocks_of(input[:, :, :height, :width], stride)
        return F.conv2d(blocks, blocks_of(self.weight, stride), self.bias)


def blocks_of(images: Tensor, size: int) -> Tensor:
    """Rearranges [N, C, H, W] to [N, size * size * C, H / size, W / size], channels last in memory.

    H and W must be multiples of size.
    """
    n, channels, height, width = images.shape
    rows, columns = height // size, width // size
    pixels = images.permute(0, 2, 3, 1).reshape(n, rows, size, columns, size, channels)
    blocks = pixels.transpose(2, 3).reshape(n, rows, columns, size * size * channels)
    return blocks.permute(0, 3, 1, 2)


class Torso(nn.Module):
    """A network that computes features [N, num_features] of frames [N, *shape] of one leaf."""

    num_features: int

    def observe(self, frames: Tensor) -> None:
        """Adds frames [N, *shape] to the running statistics; a no-op for torsos without any."""


class FlatTorso(Torso):
    """The flattened leaf itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.num_features = math.prod(shape)

    def forward(self, frames: Tensor) -> Tensor:
        return as_float(frames).reshape(frames.shape[0], -1)


class VectorTorso(FlatTorso):
    """One linear layer over the flattened leaf, and an activation."""

    def __init__(
        self, shape: tuple[int, ...], size: int, activation: Activation = torch.relu
    ) -> None:
        super().__init__(shape)
        self.linear = nn.Linear(self.num_features, size)
        self.num_features = size
        self._activation = activation

    def forward(self, frames: Tensor) -> Tensor:
        return self._activation(self.linear(super().forward(frames)))


class PreparedTorso(Torso):
    """A torso that scales or normalises its leaf first.

    scale: returns float32 of the same shape.
    """

    def __init__(self, scale: Callable[[Tensor], Tensor], torso: Torso) -> None:
        super().__init__()
        self.scale = scale
        self.torso = torso
        self.num_features = torso.num_features

    def forward(self, frames: Tensor) -> Tensor:
        return self.torso(self.scale(frames))

    def observe(self, frames: Tensor) -> None:
        if isinstance(self.scale, RunningNorm):
            self.scale.observe(frames)


class ImageTorso(Torso):
    """Base class of convolutional networks over images of one shape.

    smallest: pixels a side of the smallest image that it takes.
    """

    smallest: ClassVar[int] = 1

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._build(image_shape(shape)[0])
        with torch.no_grad():
            self.num_features = self.forward(torch.zeros(1, *shape)).shape[1]

    def _build(self, channels: int) -> None:
        """Adds the layers for images of so many channels."""
        raise NotImplementedError


class ShallowTorso(ImageTorso):
    """Three convolutions: 32 of 8x8 by 4, 64 of 4x4 by 2, 64 of 3x3 by 1, ReLU after each."""

    smallest = 36  # smaller images vanish under the strides
    as_input = staticmethod(as_images)

    def _build(self, channels: int) -> None:
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=8, stride=4)
        self.conv2 = BlockConv2d(32, 64, kernel_size=4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3, stride=1)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.as_input(frames)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu_(conv(x))
        return x.flatten(1)


class NormedShallowTorso(ShallowTorso):
    """ShallowTorso over standardised images."""

    as_input = staticmethod(as_standard_images)


class SmallTorso(ImageTorso):
    """One convolution, 16 of 3x3 by 1: MinAtar's, for images too small for the other torsos."""

    smallest = 3  # the size of the filter

    def _build(self, channels: int) -> None:
        self.conv = nn.Conv2d(channels, 16, kernel_size=3)

    def forward(self, frames: Tensor) -> Tensor:
        return F.relu_(self.conv(as_images(frames))).flatten(1)


class DeepTorso(ImageTorso):
    """IMPALA's ResNet: sections of 16, 32 and 32 channels, each halving height and width."""

    def _build(self, channels: int) -> None:
        sizes = [channels, 16, 32, 32]
        self.feat_convs = nn.ModuleList(_downsample(*pair) for pair in pairwise(sizes))
        self.resnet1 = nn.ModuleList(_residual(size) for size in sizes[1:])
        self.resnet2 = nn.ModuleList(_residual(size) for size in sizes[1:])

    def forward(self, frames: Tensor) -> Tensor:
        x = as_images(frames)
        for downsample, first, second in zip(
            self.feat_convs, self.resnet1, self.resnet2, strict=True
        ):
            x = downsample(x)
            x = x + first(x)
            x = x + second(x)
        return F.relu_(x).flatten(1)


class FixupTorso(ImageTorso):
    """DeepTorso with Fixup's residual blocks instead (Zhang et al. 2019, arXiv 1901.09321).

    They need no normalisation: each starts as the identity, with a first convolution that is scaled
    down by the root of the number of blocks, a second one of zeros, and scalars for biases.
    """

    def _build(self, channels: int) -> None:
        sizes = [channels, 16, 32, 32]
        num_blocks = 2 * (len(sizes) - 1)
        self.feat_convs = nn.ModuleList(_downsample(*pair) for pair in pairwise(sizes))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(FixupBlock(size, num_blocks) for _ in range(2))) for size in sizes[1:]
        )

    def forward(self, frames: Tensor) -> Tensor:
        x = as_images(frames)
        for downsample, blocks in zip(self.feat_convs, self.blocks, strict=True):
            x = blocks(downsample(x))
        return F.relu_(x).flatten(1)


class FixupBlock(nn.Module):
    """x + scale * conv2(relu(conv1(relu(x) + b1) + b2) + b3) + b4."""

    def __init__(self, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.biases = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))
        deviation = math.sqrt(2 / (9 * channels * num_blocks))  # He's, over the root of the blocks
        nn.init.normal_(self.conv1.weight, std=deviation)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.biases
        branch = self.conv1(F.relu(x) + first)
        branch = self.conv2(F.relu(branch + second) + third)
        return x + self.scale * branch + last


def _downsample(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel_size=3, padding=1),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _residual(channels: int) -> nn.Sequential:
    """Builds a residual block; its first ReLU copies, because the input is added to the output."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1),
    )
