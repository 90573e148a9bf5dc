# SPDX-License-Identifier: Apache-2.0
"""A CudaStream moves leaves between host and device; on the CPU it neither copies nor waits."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.cuda_stream import CudaStream

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
