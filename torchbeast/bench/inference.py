# SPDX-License-Identifier: Apache-2.0
"""Inference alone: the batches of one stream answered as PolyBeast answers them, by as many
threads, which load new weights as often.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import torch

from torchbeast.bench import synthetic
from torchbeast.bench.sample import Measure, in_threads
from torchbeast.core.actors.agent import Agent
from torchbeast.core.cuda_stream import CudaStream
from torchbeast.core.envs.spaces import ObservationSpace
from torchbeast.learning.weights import PublishedWeights
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.inference import answer


def inference(
    agent: Agent,
    space: ObservationSpace,
    device: torch.device,
    num_envs: int,
    num_threads: int,
    steps_an_update: int,
    supervisor: Supervisor,
) -> Measure:
    """Batches of `num_envs`. `steps_an_update`: after which there are new weights."""
    weights = PublishedWeights(agent.model)
    batches_an_update = max(1, steps_an_update // (num_envs * num_threads))

    def thread() -> Callable[[], int]:
        replica, count = copy.deepcopy(agent.model), itertools.count()
        cuda_stream = CudaStream(device)
        asked = synthetic.inference_request(agent, space, num_envs)

        def one_batch() -> int:
            is_new = next(count) % batches_an_update == 0
            with cuda_stream:
                weights.refresh(replica, None if is_new else weights.version)
                answer(replica, cuda_stream, asked, extras=("policy_logits",))
            return num_envs

        one_batch()  # the first is slower
        return one_batch

    threads = [thread() for _ in range(num_threads)]
    return functools.partial(in_threads, threads, supervisor=supervisor)
