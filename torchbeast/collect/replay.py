# SPDX-License-Identifier: Apache-2.0
"""The replay as sources see it, and the base class of sources with a replay.

A source inserts the online columns of batches after the learner has trained on them, and lets the
replay write windows into the spare columns of other batches. A `RolloutReplay` belongs
to one run; `shared_replay.py` and `on_ray/replay.py` have clients of a replay that agents share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.storages.replay.rollout_replay import Priorities as Priorities
from torchbeast.core.storages.replay.rollout_replay import ReplayedColumns as ReplayedColumns
from torchbeast.core.storages.replay.store import Arrays as Arrays
from torchbeast.core.storages.replay.store import ReplayStats as ReplayStats


class ReplayClosed(Exception):
    """The replay was closed, before or during the call."""


class Replay(Protocol):
    """A replay of rollouts. One thread makes all calls but `close`.

    Calls raise ReplayClosed once it is closed.
    """

    def stats(self) -> ReplayStats:
        """Returns metrics; of a shared replay over all agents, when it was last used. Any thread
        may call it.
        """

    def insert(self, arrays: Arrays, *, priorities: Priorities | None = None) -> None:
        """Stores a batch; `arrays` includes its final observations.

        priorities: for a replay that samples by them.

        Raises ValueError if it cannot be stored.
        """

    def fill(
        self, arrays: Arrays, columns: slice, first_walk: int | None
    ) -> ReplayedColumns | None:
        """Writes a window into each of these columns. Returns None until the replay holds a
        complete episode, or by priority a complete rollout.

        first_walk: number of the walk that continues in the first column; the walks after it
            continue in the columns after it. None: any windows, for a network without memory.
        """

    def close(self) -> None:
        """Ends every call; any thread may call it, repeatedly."""


_NUMBERS = ("env_index", "rollout_index")


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """Describes an agent's rollouts, and the replay that it expects.

    row: a nest of ArraySpec [*shape] for each stored field, with complete frame stacks.
    """

    name: str  # of the agent's run; a run that joins again under its name is the same agent
    row: Mapping[str, Any]
    unroll_length: int
    frame_stack: int
    replay_size: int  # capacity of the replay, in transitions
    columns: int  # per insertion
    spare_columns: int  # per `fill`
    seed: int  # of sampling, if this agent is the first

    def batch(self, columns: int) -> dict[str, Any]:
        """Returns a nest of ArraySpec [T+1, columns, *shape] for each field."""
        leading = self.unroll_length + 1, columns
        rows = {**self.row, **{name: ArraySpec((), "int64") for name in _NUMBERS}}
        return map_leaves(lambda spec: ArraySpec((*leading, *spec.shape), spec.dtype), rows)

    def check_same(self, other: JoinRequest) -> None:
        """Raises ValueError, with a difference, unless another agent's rollouts fit into the replay
        that this agent's request has determined.
        """
        for name in ("replay_size", "unroll_length", "frame_stack", "row"):
            ours, theirs = getattr(self, name), getattr(other, name)
            require(
                ours == theirs,
                f"the shared replay has {name} {ours}, this agent {theirs}: agents that share a "
                "replay need the same environment, network inputs, unroll_length and replay_size",
            )


Join = Callable[[JoinRequest], AbstractContextManager[Replay]]
"""Joins a replay that agents share, for a block."""
