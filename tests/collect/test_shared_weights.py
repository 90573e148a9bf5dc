# SPDX-License-Identifier: Apache-2.0
"""Readers get the weights of a single version, and nobody waits for a dead reader."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import warm
from background import SOON, Background
from torch import nn
from weights_reader import model, values

from torchbeast.collect.config import MAX_FIXED_LAG
from torchbeast.collect.weights import PublishedWeights, SharedWeights, ring_size, unpacked

READER = Path(__file__).with_name("weights_reader.py")


@torch.no_grad()
def publish(weights: SharedWeights, of: nn.Module, version: int) -> None:
    """Publishes weights that all equal the number of their version."""
    for tensor in of.state_dict().values():
        tensor.fill_(version)
    weights.publish(of, version)


@contextmanager
def reader(weights: SharedWeights) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that is in the middle of reading the newest version."""
    words = [str(READER), str(weights.descriptor), str(weights.size)]
    process = warm.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[weights.descriptor],
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_reader_gets_the_newest_version_once() -> None:
    owned = model()
    weights = SharedWeights(owned, version=7, size=2)
    for version in range(8, 12):
        publish(weights, owned, version)
    replica = model()
    assert weights.refresh(replica, held=None) == 11 == weights.version
    assert values(replica) == {11.0}
    with torch.no_grad():
        replica[0].weight.fill_(-1.0)
    assert weights.refresh(replica, held=11) == 11
    assert -1.0 in values(replica), "nothing is loaded that is held already"


def test_wanted_versions_are_found_as_long_as_they_are_in_the_ring() -> None:
    owned, replica = model(), model()
    weights = SharedWeights(owned, version=0, size=4)
    for version in range(1, 6):
        publish(weights, owned, version)
    for version in (2, 3, 4, 5):
        assert weights.refresh(replica, held=None, wanted=version) == version
        assert values(replica) == {float(version)}
    for version in (0, 1, 6):
        with pytest.raises(
            LookupError, match=f"version {version} is not among the 4 versions up to 5"
        ):
            weights.refresh(replica, held=None, wanted=version)


def test_places_that_were_never_written_hold_no_version() -> None:
    owned, replica = model(), model()
    weights = SharedWeights(owned, version=5, size=4)
    for version in (0, 2, 3, 4, 6):
        with pytest.raises(LookupError):
            weights.refresh(replica, held=None, wanted=version)


def test_on_publish_is_called_once_the_version_can_be_read() -> None:
    owned, told = model(), []
    weights = SharedWeights(owned, version=0, size=2)
    weights.on_publish = lambda: told.append(weights.version)
    publish(weights, owned, 1)
    assert told == [1]


def test_weights_that_are_overwritten_while_they_are_copied_are_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learning goes on meanwhile, and fills the ring."""
    owned = nn.Linear(2, 2)
    weights = SharedWeights(owned, version=7)
    publish(weights, owned, 8)
    writes = iter([range(9, 13), range(13, 16)])  # to its place; and not as far as that

    class Meanwhile:
        uint8 = np.uint8

        def frombuffer(self, *arguments: Any) -> Any:
            for version in next(writes):
                publish(weights, owned, version)
            return np.frombuffer(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("torchbeast.collect.weights.np", Meanwhile())
        version, sent = weights.newest
    assert version == 12, "in the place of 8"
    assert values(loaded(owned, sent)) == {12.0} and next(writes, None) is None


def loaded(like: nn.Module, sent: np.ndarray) -> nn.Module:
    like.load_state_dict(unpacked(sent, like))
    return like


def test_a_version_whose_place_is_still_read_is_left_out() -> None:
    """So no reader sees weights of two versions, and the learner waits for nobody."""
    owned = model()
    weights = SharedWeights(owned, version=0, size=2)
    publish(weights, owned, 0)
    with reader(weights) as process:
        for version, newest in ((1, 1), (2, 1), (3, 3)):
            Background(publish, weights, owned, version).result()
            assert weights.version == newest
        said, _ = process.communicate(timeout=SOON)
    assert said == "{0.0}\n"
    publish(weights, owned, 4)
    assert weights.version == 4


def test_a_reader_that_is_killed_while_it_reads_keeps_no_place() -> None:
    owned = model()
    weights = SharedWeights(owned, version=0, size=2)
    with reader(weights) as process:
        with pytest.raises(BlockingIOError):  # it does hold the place of version 0, and of 2
            fcntl.lockf(weights.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
        process.kill()
        process.wait()
        publish(weights, owned, 2)
    assert weights.version == 2


def test_a_place_holds_no_version_while_it_is_written() -> None:
    class Looking(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # asked for in the middle
            found.append((weights.version, weights._holds(1), weights._holds(3)))
            return super().state_dict(*args, **kwargs)

    found: list[tuple[int, bool, bool]] = []
    owned = nn.Linear(2, 2)
    weights = SharedWeights(owned, version=1, size=2)
    looking = Looking(2, 2)
    weights.publish(looking, 3)
    assert found == [(1, False, False)] and weights._holds(3) and not weights._holds(1)


def test_the_largest_fixed_lag_fits_the_ring() -> None:
    model = torch.nn.Linear(1, 1)
    weights = SharedWeights(model, size=ring_size(MAX_FIXED_LAG))
    for version in (0, 1, MAX_FIXED_LAG + 1):  # the first and the last places
        weights.publish(model, version)
    assert all(map(weights._holds, (0, 1, MAX_FIXED_LAG + 1)))


def test_a_snapshot_of_another_version_than_the_wanted_one_is_not_loaded() -> None:
    owned, replica = model(), model()
    weights = PublishedWeights(owned, version=5)
    assert weights.refresh(replica, held=None, wanted=5) == 5
    with pytest.raises(LookupError, match="version 4 is not the newest one, 5"):
        weights.refresh(replica, held=5, wanted=4)


def test_readers_wait_for_the_gpu_that_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current GPU of the thread that publishes may be another one."""
    gpu, event = torch.device("cuda:1"), Mock()
    weight = Mock(is_cuda=True, device=gpu)
    weight.detach.return_value.clone.return_value = weight
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    weights = PublishedWeights(Mock(state_dict=lambda: {"weight": weight}))
    weights.refresh(Mock(), held=None)
    event.record.assert_called_once_with(gpu)
    event.wait.assert_called_once_with(gpu)
