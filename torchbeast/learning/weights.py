# SPDX-License-Identifier: Apache-2.0
"""Publication of weights from the learner to the threads that act.

    learner -- publish(model) -> one immutable snapshot -- refresh(replica) -> inference threads

A snapshot is an immutable copy, so no reader sees weights of two versions. Each thread loads the
newest one into its own replica of the model between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Snapshot:
    """An immutable copy of the weights after `version` updates."""

    version: int
    tensors: dict[str, Tensor]
    written: torch.cuda.Event | None  # recorded after the copy on the GPU; None: on the CPU


class PublishedWeights:
    """The newest snapshot. One thread publishes, any number of threads read."""

    def __init__(self, model: nn.Module, version: int = 0) -> None:
        self._snapshot = _snapshot(model, version)

    @property
    def version(self) -> int:
        """Version of the newest snapshot."""
        return self._snapshot.version

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as this version."""
        self._snapshot = _snapshot(model, version)  # replaced in one assignment

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the newest snapshot unless `replica` already holds it; returns its version.

        held: the version that `replica` holds; None: unknown. Raises LookupError if another version
        than the newest is wanted.
        """
        snapshot = self._snapshot
        if wanted not in (None, snapshot.version):
            raise LookupError(f"version {wanted} is not the newest one, {snapshot.version}")
        if snapshot.version != held:
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
    """Loads a snapshot; the reader's CUDA stream waits for the copy and keeps its memory alive."""
    if snapshot.written is None:
        replica.load_state_dict(snapshot.tensors)
        return
    snapshot.written.wait()
    replica.load_state_dict(snapshot.tensors)
    for tensor in snapshot.tensors.values():
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
