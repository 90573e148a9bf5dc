# SPDX-License-Identifier: Apache-2.0
"""How environments are spread over server processes and streams.

A stream is a group of environments that are stepped together. A server opens two streams when it
can, so that one group is stepped while actions are chosen for the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerPlan:
    """What one server process serves."""

    num_streams: int
    envs_per_stream: int

    @property
    def num_envs(self) -> int:
        """Environments of this server."""
        return self.num_streams * self.envs_per_stream


def spread(num_actors: int, num_servers: int) -> list[ServerPlan]:
    """A plan for each server, `num_actors` environments in all, as even as can be.

    Environments are dealt in pairs, so that servers have even numbers and can have two streams;
    one by one when there are too few for that.
    """
    if num_actors < num_servers:
        raise ValueError(f"{num_actors} environments cannot occupy {num_servers} servers")
    pairs, single = divmod(num_actors, 2)
    if pairs < num_servers:
        return [_plan(n) for n in deal(num_actors, num_servers)]
    counts = [2 * n for n in deal(pairs, num_servers)]
    counts[-1] += single
    return [_plan(n) for n in counts]


def rollout_columns(batch_size: int, envs_per_stream: Iterable[int]) -> int:
    """Columns in one item of the learner's queue:
    the most that fill a batch and divide every stream.
    """
    return math.gcd(batch_size, *envs_per_stream)


def deal(things: int, hands: int) -> list[int]:
    """`things` over `hands`, as even as can be."""
    each, more = divmod(things, hands)
    return [each + (i < more) for i in range(hands)]


def _plan(num_envs: int) -> ServerPlan:
    streams = 2 if num_envs % 2 == 0 else 1
    return ServerPlan(num_streams=streams, envs_per_stream=num_envs // streams)
