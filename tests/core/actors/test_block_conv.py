# SPDX-License-Identifier: Apache-2.0
"""A convolution over blocks is nn.Conv2d: results, gradients, weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchbeast.core.actors.torsos import BlockConv2d, blocks_of

# in_channels, out_channels, kernel_size, stride, height, width
EVEN = (32, 64, 4, 2, 20, 20)
LEFT_OVER = (3, 5, 4, 2, 11, 9)  # a row and a column that no filter reaches
FAR_OVER = (3, 5, 3, 3, 8, 7)
TALL = (2, 3, 6, 2, 12, 6)
WITHOUT_STRIDE = (2, 3, 3, 1, 6, 5)
CASES = [EVEN, LEFT_OVER, FAR_OVER, TALL, WITHOUT_STRIDE]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_and_gradients_are_those_of_conv2d(
    case: tuple[int, ...], layout: torch.memory_format
) -> None:
    in_channels, out_channels, kernel_size, stride, height, width = case
    ours = BlockConv2d(in_channels, out_channels, kernel_size, stride).double()
    plain = nn.Conv2d(in_channels, out_channels, kernel_size, stride).double()
    plain.load_state_dict(ours.state_dict())  # the same names and shapes
    images = torch.randn(3, in_channels, height, width, dtype=torch.double)
    images = images.contiguous(memory_format=layout).requires_grad_()
    got, wanted = ours(images), plain(images)
    torch.testing.assert_close(got, wanted)
    towards = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, [images, *ours.parameters()], towards),
        torch.autograd.grad(wanted, [images, *plain.parameters()], towards),
    )


def test_a_block_is_a_pixel_with_all_its_values_as_channels() -> None:
    image = torch.arange(16).view(1, 1, 4, 4)
    blocks = blocks_of(image, 2)
    assert blocks[0, :, 0, 0].tolist() == [0, 1, 4, 5]
    assert blocks[0, :, 0, 1].tolist() == [2, 3, 6, 7]
    assert blocks[0, :, 1, 0].tolist() == [8, 9, 12, 13]
    assert blocks.is_contiguous(memory_format=torch.channels_last)
