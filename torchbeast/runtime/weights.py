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
            replica.load_state_dict(snapshot.tensors)
        return snapshot.version


@torch.no_grad()
def _snapshot(model: nn.Module, version: int) -> Snapshot:
    return Snapshot(version, {k: v.detach().clone() for k, v in model.state_dict().items()})
