# SPDX-License-Identifier: Apache-2.0
"""A learner without a network, the one that `scale.py` measures: it drops every batch.

Its streams, inference batches and learner batches are PolyBeast's, and its policy returns zeros.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import libtorchbeast
from torchbeast.fleets.system import allow_descriptors
from torchbeast.servers.config import PipelineConfig, SecurityConfig
from torchbeast.servers.discovery import Asking, find_servers
from torchbeast.servers.joining import JoinServer
from torchbeast.servers.security import credentials
from torchbeast.servers.source import learner_queue, rollout_columns

UNROLL_LENGTH, BATCH_SIZE = 10, 32
_PATIENCE_S = 120.0


class EmptyLearner:
    """The threads of a learner: streams, inference, and batches that are dropped."""

    def __init__(
        self, address: str, listens: bool, envs_per_stream: int, tls: Mapping[str, Any]
    ) -> None:
        """Finds the servers, or waits for hosts; tls: files of this end by the names of flags."""
        allow_descriptors()
        security = SecurityConfig(**tls) if tls else SecurityConfig(insecure=True)
        columns = rollout_columns(BATCH_SIZE, [envs_per_stream])
        self._queue = learner_queue(BATCH_SIZE, PipelineConfig(), columns)
        self._batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=None)
        addresses = []
        if not listens:
            own = None if address.startswith("unix:") else security
            addresses = find_servers([address], None, Asking(_PATIENCE_S, own)).stream_addresses
        self._pool = libtorchbeast.ActorPool(
            UNROLL_LENGTH,
            self._queue,
            self._batcher,
            addresses,
            (),
            rollout_columns=columns,
            credentials=None if address.startswith("unix:") else credentials(security),
        )
        self._rows, self._batches = 0, 0
        bodies = [self._pool.run, self._answer, self._drop]
        if listens:
            door = JoinServer(address, security)
            door.find(None, _PATIENCE_S, lambda: None)
            bodies.append(lambda: door.follow(self._pool, columns, 0, threading.Event()))
        self._threads = [threading.Thread(target=body, daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _answer(self) -> None:
        for batch in self._batcher:
            (_, reward, *_), _ = batch.get_inputs()
            self._rows += reward.shape[1]
            self._batches += 1
            batch.set_outputs(((torch.zeros(reward.shape, dtype=torch.int64),), ()))

    def _drop(self) -> None:
        for _ in self._queue:
            pass

    def so_far(self) -> dict[str, Any]:
        """Returns counts and use since the start; python_cpu: CPU seconds of Python's threads."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in self._threads]  # type: ignore[arg-type]
        return {
            "steps": self._pool.steps(),
            "streams": self._pool.live_streams(),
            "lost": self._pool.lost_streams(),
            "rows": self._rows,
            "batches": self._batches,
            "cpu": time.process_time(),
            "python_cpu": sum(time.clock_gettime(clock) for clock in clocks),
            "threads": len(os.listdir("/proc/self/task")),
            "megabytes": int(Path("/proc/self/statm").read_text().split()[1]) / 256,
        }


def run(pipe: Connection, *settings: Any) -> None:
    """Learns until it is killed; sends `so_far` for each message, and once when streams connect."""
    torch.set_num_threads(1)
    learner = EmptyLearner(*settings)
    while True:
        pipe.send(learner.so_far())
        pipe.recv()
