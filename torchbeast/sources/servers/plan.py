# SPDX-License-Identifier: Apache-2.0
"""Divides environments among server processes and streams.

A stream is a group of environments that are stepped together. With two streams a server steps one
group while actions are chosen for the other. With one stream, inference batches are twice as large,
which is better if inference shares its cores with the servers: those are busy anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchbeast.sources.config import split_evenly
from torchbeast.sources.servers.config import FleetConfig


@dataclass(frozen=True)
class ServerPlan:
    """The environments of one server process."""

    num_streams: int
    envs_per_stream: int

    @property
    def num_envs(self) -> int:
        """Number of environments of the server."""
        return self.num_streams * self.envs_per_stream


def spread(num_actors: int, num_servers: int, num_streams: int = 2) -> list[ServerPlan]:
    """Returns one plan per server; together they serve `num_actors` environments.

    Environments are assigned in groups of `num_streams`, so that all streams of a server have the
    same size; one by one when there are too few for that.
    """
    if num_actors < num_servers:
        raise ValueError(f"{num_actors} environments cannot occupy {num_servers} servers")
    groups, single = divmod(num_actors, num_streams)
    if groups < num_servers:
        return [_plan(n, num_streams) for n in split_evenly(num_actors, num_servers)]
    counts = [num_streams * n for n in split_evenly(groups, num_servers)]
    counts[-1] += single
    return [_plan(n, num_streams) for n in counts]


def plans_for_local_servers(fleet: FleetConfig, disable_cuda: bool) -> list[ServerPlan]:
    """Returns the plans of servers on the learner's machine.

    Each has two streams if the learner uses a GPU, else one.
    """
    on_gpu = seems_to_have_a_gpu() and not disable_cuda
    return spread(fleet.environments(), fleet.servers(), num_streams=2 if on_gpu else 1)


def seems_to_have_a_gpu() -> bool:
    """Returns whether a GPU driver is present; importing torch to ask it would take seconds."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def rollout_columns(batch_size: int, envs_per_stream: Iterable[int]) -> int:
    """Returns the number of columns of an item in the learner's queue.

    It is the largest that divides the batch and every stream evenly.
    """
    return math.gcd(batch_size, *envs_per_stream)


def _plan(num_envs: int, num_streams: int) -> ServerPlan:
    streams = num_streams if num_envs % num_streams == 0 else 1
    return ServerPlan(num_streams=streams, envs_per_stream=num_envs // streams)
