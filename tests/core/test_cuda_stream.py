# SPDX-License-Identifier: Apache-2.0
"""A CudaStream moves leaves between host and device; on the CPU it neither copies nor waits."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.base.computing import CudaStream, dense

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip_to_the_device_is_complete_after_synchronize(device: str) -> None:
    cuda_stream = CudaStream(torch.device(device))
    numbers = torch.arange(1_000_000, dtype=torch.float64)
    for factor in range(1, 20):  # memory is reused, which must not happen too early
        with cuda_stream:
            sent = cuda_stream.to_device(numbers * factor)
            result = cuda_stream.to_host(sent + sent)
            cuda_stream.synchronize()
        assert result.device.type == "cpu"
        assert result.equal(2 * factor * numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_an_expanded_leaf_goes_to_the_device(device: str) -> None:
    cuda_stream, streams = CudaStream(torch.device(device)), torch.arange(3).expand(4, 3)
    with cuda_stream:
        sent = cuda_stream.to_host(cuda_stream.to_device(streams))
        cuda_stream.synchronize()
    assert sent.equal(streams)


def test_elements_that_share_memory_get_their_own() -> None:
    streams = torch.arange(3).expand(4, 3)
    own = dense(streams)
    own[0] += 10  # of the first row only
    assert own[1:].equal(streams[1:])
    copied = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype)  # as pinning does it
    assert copied.copy_(own).equal(own)


def test_images_keep_their_layout() -> None:
    images = torch.zeros(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    assert dense(images) is images


@pytest.mark.parametrize("device", DEVICES)
def test_a_leaf_handed_over_is_complete_on_the_current_stream(device: str) -> None:
    cuda_stream = CudaStream(torch.device(device))
    numbers = torch.arange(1_000_000, dtype=torch.float64)
    totals = []
    for factor in range(1, 20):
        with cuda_stream:
            sent = cuda_stream.to_device(numbers * factor)
        totals.append(cuda_stream.hand_over(sent).max())
    assert [total.item() for total in totals] == [999_999 * factor for factor in range(1, 20)]


def test_nothing_is_copied_on_the_cpu() -> None:
    cuda_stream, leaf = CudaStream(torch.device("cpu")), torch.zeros(3)
    with cuda_stream:
        sent = cuda_stream.to_device(leaf)
        assert (
            sent is leaf
            and cuda_stream.to_host(sent) is leaf
            and cuda_stream.hand_over(sent) is leaf
        )
