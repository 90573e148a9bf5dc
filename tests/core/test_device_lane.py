# SPDX-License-Identifier: Apache-2.0
"""A lane moves leaves between host and device; on the CPU it neither copies nor waits."""

from __future__ import annotations

import pytest
import torch

from torchbeast.core.device_lane import DeviceLane

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_computed_and_fetched_is_whole_after_the_wait(device: str) -> None:
    lane = DeviceLane(torch.device(device))
    numbers = torch.arange(1_000_000, dtype=torch.float64)
    for factor in range(1, 20):  # memory is used again, and must not be too early
        with lane:
            sent = lane.send(numbers * factor)
            result = lane.fetch(sent + sent)
            lane.wait()
        assert result.device.type == "cpu"
        assert result.equal(2 * factor * numbers)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_handed_over_is_whole_for_the_one_who_uses_it(device: str) -> None:
    lane = DeviceLane(torch.device(device))
    numbers = torch.arange(1_000_000, dtype=torch.float64)
    totals = []
    for factor in range(1, 20):
        with lane:
            sent = lane.send(numbers * factor)
        totals.append(lane.hand_over(sent).max())
    assert [total.item() for total in totals] == [999_999 * factor for factor in range(1, 20)]


def test_on_the_cpu_nothing_is_copied() -> None:
    lane, leaf = DeviceLane(torch.device("cpu")), torch.zeros(3)
    with lane:
        sent = lane.send(leaf)
        assert sent is leaf and lane.fetch(sent) is leaf and lane.hand_over(sent) is leaf
