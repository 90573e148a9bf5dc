# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors: what a `RayFleet` makes in the processes of a cluster."""

from __future__ import annotations

import os
import warnings
from typing import Any

from torchbeast.collect.weights import Packed
from torchbeast.collect.worker import RolloutWorker
from torchbeast.fleets.fleet import FleetWorker, WorkerLocation
from torchbeast.gradients.worker import GradientWorker


class _OnRay(FleetWorker):
    """The base class of workers as Ray actors. Ray's dashboard shows the class names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Weights are in the object store, which is read-only, and are never written to.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")

    def place(self) -> WorkerLocation:
        """Returns where the worker runs."""
        import ray

        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return WorkerLocation(host, os.getpid(), node)


class TorchBeastActor(_OnRay, RolloutWorker):
    """A worker that plays rollouts."""

    def fetched(self, weights: Any) -> Packed:
        """Returns the weights of a reference.

        The reference is in a list, because Ray would resolve a bare one before the call, and delay
        later calls.
        """
        import ray

        return ray.get(weights[0])


class TorchBeastGradientWorker(_OnRay, GradientWorker):
    """A gradient worker. Ray fetches the weights before it executes a call."""
