# SPDX-License-Identifier: Apache-2.0
"""Processes that the learner did not start read its weights, and no others."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import warm
from torch import nn

from torchbeast.collect.weights import RingAddress, SharedWeights, address_of, opened

READER = """
import torch
from torchbeast.collect.weights import RingAddress, opened
replica = torch.nn.Linear(2, 2)
ring = opened(RingAddress(*{address}), replica)
print(ring.refresh(replica, None), set(replica.weight.flatten().tolist()))
"""


def made() -> SharedWeights:
    model = nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 3.0)
    return SharedWeights(model, version=8)


def address(ring: SharedWeights) -> RingAddress:
    found = address_of(ring, "a node")
    assert found is not None
    return found


def test_a_process_that_inherits_nothing_reads_the_newest_weights() -> None:
    ring = made()
    said = warm.run(READER.format(address=tuple(address(ring))))
    assert said.stdout == "8 {3.0}\n"


def test_versions_that_are_published_later_are_read_too() -> None:
    ring, model, replica = made(), nn.Linear(2, 2), nn.Linear(2, 2)
    reader = opened(address(ring), replica)
    assert reader is not None and reader.version == 8
    ring.publish(model, 9)
    assert reader.refresh(replica, held=8) == 9
    assert torch.equal(replica.weight, model.weight)


def test_another_file_behind_the_same_path_is_not_opened(tmp_path: Path) -> None:
    """Another process with the same number, in a container, may hold anything by that number."""
    there, other = address(made()), tmp_path / "other"
    other.write_bytes(bytes(10**6))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # to open it would wait for a writer
    for path in (other, fifo):
        assert opened(there._replace(file=str(path)), nn.Linear(2, 2)) is None
    own = os.stat(other)
    wrong_inode = RingAddress("a node", str(other), own.st_dev, own.st_ino + 1, 4)
    assert opened(wrong_inode, nn.Linear(2, 2)) is None


def test_a_process_that_is_gone_or_hidden_has_no_ring() -> None:
    there = address(made())
    assert opened(there._replace(file="/proc/0/fd/3"), nn.Linear(2, 2)) is None


def test_a_ring_of_larger_weights_than_the_file_holds_is_not_opened() -> None:
    gc.collect()  # files of other tests
    before = open_files()
    ring = made()
    assert opened(address(ring), nn.Linear(2000, 20)) is None
    del ring
    assert open_files() == before


def test_a_learner_outside_the_cluster_shares_with_its_children_alone() -> None:
    ring = made()
    assert address_of(ring, "") is None
    inherited = address_of(ring, "", is_inherited=True)
    assert inherited is not None
    reader = opened(inherited, nn.Linear(2, 2))
    assert reader is not None and reader.version == 8


def test_a_reader_that_is_dropped_keeps_no_file_open() -> None:
    gc.collect()  # files of other tests
    ring, before = made(), open_files()
    reader = opened(address(ring), nn.Linear(2, 2))
    assert reader is not None and open_files() > before
    del reader
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def linux_only() -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("there is no /proc")
