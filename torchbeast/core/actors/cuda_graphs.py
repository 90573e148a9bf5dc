# SPDX-License-Identifier: Apache-2.0
"""Acting on a GPU with CUDA graphs: the kernels of a forward are launched in one call.

Python takes a millisecond to launch the kernels of a network one by one, and the GPU computes them
in a tenth of that. Threads do not help, because only one of them runs Python at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.base.nest import Nest, map_leaves, map_leaves2
from torchbeast.errors import RunError

_LARGEST = 1024  # environments of the largest batch that is recorded

Forward = Callable[[ModelInputs, Nest[Tensor]], ModelOutput]


def use_cuda_graphs(replicas: Sequence[Actor], num_envs: int) -> None:
    """Lets replicas that act in one thread each replay their forwards as CUDA graphs.

    A graph has a fixed batch size: one is recorded for every power of two up to `num_envs`, and a
    smaller batch fills the first columns of the next larger one. Only actor-critics are recorded
    that are `recordable` and `separable`. Others, and all on the CPU, act as before. Weights must
    be loaded in place.

    Args:
        replicas: Copies of one actor, on one device.
        num_envs: The largest number of environments in a batch; 0: unknown.
    """
    for module in (module for actor in replicas for module in actor.modules()):
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # a copy's are not, and every call would join them
    actors = [actor for actor in replicas if isinstance(actor, ActorCritic) and actor.recordable]
    on_gpu = all(parameter.is_cuda for actor in actors for parameter in actor.parameters())
    if not on_gpu or not all(actor.separable for actor in actors):
        return
    recorder = _Recorder([_Graphs(actor.forward) for actor in actors], num_envs or _LARGEST)
    for actor, graphs in zip(actors, recorder.all_graphs, strict=True):
        actor.forward = functools.partial(recorder.forward, graphs)  # type: ignore[method-assign]


class _Recorder:
    """Records the graphs of all replicas when the first batch arrives.

    Recording must not overlap with random numbers of another thread on the same GPU. Before the
    first batch is answered the learner waits for a rollout, and so do the other replicas.
    """

    def __init__(self, all_graphs: Sequence[_Graphs], num_envs: int) -> None:
        self.all_graphs = all_graphs
        self._largest = min(1 << (num_envs - 1).bit_length(), _LARGEST)
        self._lock = threading.Lock()
        self._is_done = False

    def forward(self, graphs: _Graphs, inputs: ModelInputs, state: Nest[Tensor]) -> ModelOutput:
        if not self._is_done:
            with self._lock:
                if not self._is_done:
                    self._record(inputs, state)
        return graphs.forward(inputs, state)

    def _record(self, inputs: ModelInputs, state: Nest[Tensor]) -> None:
        torch.cuda.synchronize(inputs.reward.device)
        try:
            for graphs in self.all_graphs:
                graphs.record(inputs, state, self._largest)
        except RuntimeError as error:  # torch's random numbers cannot be used after it
            raise RunError(
                "the network's forward cannot be recorded as a CUDA graph, perhaps because it "
                f"reads a result on the host: set its class attribute recordable to False ({error})"
            ) from error
        torch.cuda.synchronize(inputs.reward.device)
        self._is_done = True


class _Graphs:
    """The graphs of one replica, by batch size, and the tensors that they read and write."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Any, ModelOutput]] = {}

    def record(self, inputs: ModelInputs, state: Nest[Tensor], largest: int) -> None:
        """Records the forward for 1, 2, 4, ..., `largest` environments.

        inputs, state: an example. The graphs share their working memory: they run one at a time.
        """
        # A new stream, because the workspace of matrix products belongs to a stream.
        stream = torch.cuda.Stream(inputs.reward.device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for size in (1 << power for power in range(largest.bit_length())):
                self._recorded[size] = self._recording(inputs, state, size, pool)

    def _recording(
        self, inputs: ModelInputs, state: Nest[Tensor], size: int, pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Any, ModelOutput]:
        def zeros(leaf: Tensor) -> Tensor:
            return leaf.new_zeros(leaf.shape[0], size, *leaf.shape[2:])

        read = map_leaves(zeros, (tuple(inputs), state))
        arguments = ModelInputs(*read[0]), read[1]
        for _ in range(2):  # libraries choose their kernels, and allocate
            self._forward(*arguments)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            written = self._forward(*arguments)
        finally:
            graph.capture_end()
        return graph, read, written

    def forward(self, inputs: ModelInputs, state: Nest[Tensor]) -> ModelOutput:
        """Returns the outputs, which the next call overwrites.

        inputs, state: one row, [1, B, ...] and [layers, B, hidden].
        """
        num_envs = inputs.reward.shape[1]
        size = 1 << (num_envs - 1).bit_length()
        if size not in self._recorded:
            return self._forward(inputs, state)
        graph, read, written = self._recorded[size]
        map_leaves2(lambda to, leaf: to[:, :num_envs].copy_(leaf), read, (tuple(inputs), state))
        graph.replay()
        return ModelOutput(*map_leaves(lambda leaf: leaf[:, :num_envs], tuple(written)))
