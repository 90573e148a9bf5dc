# SPDX-License-Identifier: Apache-2.0
"""Measures inference alone: as many threads as PolyBeast's answer batches of one stream.

They load new weights as often as in the program.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from bench import synthetic
from bench.sample import Measure, in_threads
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Actor, Agent, Mode
from torchbeast.core.actors.cuda_graphs import use_cuda_graphs
from torchbeast.core.base.computing import CudaStream
from torchbeast.core.envs.spaces import ObservationSpace
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers.source import answer


def inference(
    agent: Agent,
    space: ObservationSpace,
    device: torch.device,
    num_envs: int,
    num_threads: int,
    steps_per_update: int,
    supervisor: Supervisor,
    *,
    extras: Sequence[str],
    mode: Mode,
) -> Measure:
    """Returns the measurement of inference with batches of `num_envs` environments.

    steps_per_update: steps after which new weights are loaded. extras, mode: what the algorithm
    needs of acting, and how its actions are chosen.
    """
    weights = PublishedWeights(agent.model)
    batches_per_update = max(1, steps_per_update // (num_envs * num_threads))

    replicas = [copy.deepcopy(agent.model) for _ in range(num_threads)]
    use_cuda_graphs(replicas, num_envs)

    def thread(replica: Actor) -> Callable[[], int]:
        count, cuda_stream = itertools.count(), CudaStream(device)
        request = synthetic.inference_request(agent, space, num_envs)

        def one_batch() -> int:
            is_new = next(count) % batches_per_update == 0
            with cuda_stream:
                weights.refresh(replica, None if is_new else weights.version)
                answer(replica, cuda_stream, request, extras, mode)
            return num_envs

        one_batch()  # warm-up: the first is slower
        return one_batch

    threads = [thread(replica) for replica in replicas]
    return functools.partial(in_threads, threads, supervisor=supervisor)
