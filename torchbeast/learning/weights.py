# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the learner to the threads that act.

    learner -- publish(model) -> one immutable snapshot -- refresh(replica) -> inference threads

A snapshot is a copy that nobody writes again, so no reader sees weights of two versions. A thread
loads the newest one into its own replica of the model between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Snapshot:
    """Weights after `version` updates."""

    version: int
    tensors: dict[str, Tensor]
    written: torch.cuda.Event | None  # the GPU has made the copy; None: no GPU


class Publisher(Protocol):
    """Where the learner leaves its weights."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Makes the model's present weights the newest."""


class PublishedWeights:
    """The newest snapshot. One thread publishes, any number read."""

    def __init__(self, model: nn.Module, version: int = 0) -> None:
        self._snapshot = _snapshot(model, version)

    @property
    def version(self) -> int:
        """Version of the newest snapshot."""
        return self._snapshot.version

    def publish(self, model: nn.Module, version: int) -> None:
        """Makes the model's present weights the newest snapshot."""
        self._snapshot = _snapshot(model, version)  # replaced in one assignment

    def refresh(self, replica: nn.Module, version: int | None) -> int:
        """Loads the newest snapshot when `replica` holds another version;
        the version it then holds.
        """
        snapshot = self._snapshot
        if snapshot.version != version:
            _load(replica, snapshot)
        return snapshot.version


@torch.no_grad()
def _snapshot(model: nn.Module, version: int) -> Snapshot:
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    written = None
    if any(tensor.is_cuda for tensor in tensors.values()):
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
    return Snapshot(version, tensors, written)


def _load(replica: nn.Module, snapshot: Snapshot) -> None:
    """Streams differ: the reader's waits for the copy, whose memory is kept until it has read."""
    if snapshot.written is None:
        replica.load_state_dict(snapshot.tensors)
        return
    snapshot.written.wait()
    replica.load_state_dict(snapshot.tensors)
    for tensor in snapshot.tensors.values():
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
