# SPDX-License-Identifier: Apache-2.0
"""Measures transport alone: from environment servers to a learner that drops every batch.

Servers, sockets, actor pool, batcher and queue are the real ones; the policy returns zeros. With
environments that cost nothing (fixed_env.py, Mock) only the cost of transport remains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import libtorchbeast
from bench.sample import Measure, Sample, check_goes_on, cpu_seconds
from torchbeast.collect.config import RolloutConfig
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers.addresses import folder_basename, run_folder, server_addresses
from torchbeast.servers.config import PipelineConfig
from torchbeast.servers.env_servers import EnvServers, ServerPlan
from torchbeast.servers.source import learner_queue, rollout_columns

ZeroAction = Callable[[tuple[int, int]], Any]
"""Returns valid actions for shape (1, B), leaves [1, B, ...]."""

_CLOSED = (libtorchbeast.ClosedBatchingQueue, libtorchbeast.AsyncError)
_WARM_UP_S = 0.5
_POLL_S = 0.01


@contextmanager
def transport(
    env: EnvSpec,
    plans: Sequence[ServerPlan],
    rollouts: RolloutConfig,
    pipeline: PipelineConfig,
    zero_action: ZeroAction,
    supervisor: Supervisor,
) -> Iterator[Measure]:
    """Starts servers that live as long as the context, and yields the measurement of transport."""
    with run_folder() as folder:
        addresses = server_addresses(folder_basename(folder), len(plans))
        servers = EnvServers(supervisor, env, plans, addresses, folder)

        def measure(seconds: float) -> Sample:
            running = _Pipeline(plans, addresses, rollouts, pipeline, zero_action, supervisor)
            try:
                return running.measure(seconds, servers.pids)
            finally:
                running.close()

        try:
            servers.wait_ready()
            check_goes_on(supervisor)
            yield measure
        finally:
            servers.close()


class _Pipeline:
    """A running pipeline of streams, from `__init__` to `close`."""

    def __init__(
        self,
        plans: Sequence[ServerPlan],
        addresses: Sequence[str],
        rollouts: RolloutConfig,
        pipeline: PipelineConfig,
        zero_action: ZeroAction,
        supervisor: Supervisor,
    ) -> None:
        streams = [a for a, p in zip(addresses, plans, strict=True) for _ in range(p.num_streams)]
        columns = rollout_columns(rollouts.batch_size, [plan.envs_per_stream for plan in plans])
        self._zero_action = zero_action
        self._supervisor = supervisor
        self._queue = learner_queue(rollouts.batch_size, pipeline, columns)
        self._batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=None)
        self._pool = libtorchbeast.ActorPool(
            rollouts.unroll_length, self._queue, self._batcher, streams, (), rollout_columns=columns
        )
        self._threads: list[threading.Thread] = [
            supervisor.start_thread(f"transport: {name}", body)
            for name, body in (
                ("environments", self._pool.run),
                ("inference", self._answer),
                ("learner", self._drop),
            )
        ]

    def measure(self, seconds: float, server_pids: Sequence[int]) -> Sample:
        """Measures for some seconds, after a warm-up."""
        while self._pool.count() == 0 and not self._supervisor.wait(_POLL_S):
            continue
        self._supervisor.wait(min(_WARM_UP_S, seconds))
        before = self._reading(server_pids)
        self._supervisor.wait(seconds)
        while self._pool.count() == before.steps and not self._supervisor.wait(_POLL_S):
            continue
        after = self._reading(server_pids)
        return Sample(*(now - then for now, then in zip(after, before, strict=True)))

    def close(self) -> None:
        """Closes the streams and joins the threads."""
        for closed in (self._batcher, self._queue):
            if not closed.is_closed():
                closed.close()
        for thread in self._threads:
            thread.join()

    def _reading(self, server_pids: Sequence[int]) -> Sample:
        cpu = time.process_time() + cpu_seconds(server_pids)
        return Sample(self._pool.count(), time.perf_counter(), cpu)

    def _answer(self) -> None:
        for batch in self._batcher:
            (_, reward, *_), _ = batch.get_inputs()
            try:
                batch.set_outputs(((self._zero_action(tuple(reward.shape)),), ()))
            except _CLOSED:
                return

    def _drop(self) -> None:
        for _ in self._queue:
            pass
