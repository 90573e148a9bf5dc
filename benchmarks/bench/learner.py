# SPDX-License-Identifier: Apache-2.0
"""Measures the learner alone, with as many threads as in the program.

Each thread moves a synthetic batch to the device, learns from it and publishes the weights.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from bench.sample import Measure, in_threads
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.base.computing import CudaStream
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.fleets.supervisor import Supervisor


def learner(
    step: OptimiserStep[Any],
    rollout: Rollout,
    device: torch.device,
    num_threads: int,
    supervisor: Supervisor,
) -> Measure:
    """Returns the measurement of updates; its steps are env steps, replayed ones do not count."""
    weights, lock = PublishedWeights(step.algo.actor), threading.Lock()

    def thread() -> Callable[[], int]:
        cuda_stream = CudaStream(device)

        def update() -> int:
            with cuda_stream:
                batch = rollout.map(cuda_stream.to_device)
            with lock:
                step.update(batch.map(cuda_stream.hand_over))
                weights.publish(step.algo.actor, step.version)
            return rollout.env_steps

        return update

    updates = [thread() for _ in range(num_threads)]
    updates[0]()  # warm-up: the first is slower
    return functools.partial(in_threads, updates, supervisor=supervisor)
