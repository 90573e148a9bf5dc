# SPDX-License-Identifier: Apache-2.0
"""The learner alone: a made-up batch is moved to the device, learnt from, and the weights are
published, by as many threads as in the program.
"""

from __future__ import annotations

import functools
import threading

import torch

from torchbeast.bench.sample import Measure, in_threads
from torchbeast.core.algos.impala import Impala
from torchbeast.core.storages.rollout import Rollout
from torchbeast.runtime.supervisor import Supervisor
from torchbeast.runtime.weights import PublishedWeights


def learner(
    algo: Impala,
    rollout: Rollout,
    device: torch.device,
    num_threads: int,
    supervisor: Supervisor,
) -> Measure:
    """Steps learnt."""
    weights, lock = PublishedWeights(algo.model), threading.Lock()

    def update() -> int:
        batch = rollout.to(device)
        with lock:
            algo.update(batch)
            weights.publish(algo.model, algo.version)
        return batch.num_steps

    update()  # the first is slower
    return functools.partial(in_threads, [update] * num_threads, supervisor=supervisor)
