# SPDX-License-Identifier: Apache-2.0
"""A replay into which several agents insert and from which they sample, and what their clients have
in common, without transport.

    agent 0 --- insert ---> one ring, first in first out <--- insert --- agent 1
            <-- windows --- drawn from the episodes of all --- windows -->

An agent sends a `JoinRequest` when it joins. The first agent decides what a row contains, and how
many rows there are. When an agent leaves or dies, its episodes stay. When it joins again under its
name, its new rollouts do not continue the old ones.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torchbeast.collect.replay import (
    Arrays,
    JoinRequest,
    Priorities,
    ReplayedColumns,
    ReplayStats,
    read_windows,
)
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.replay.store import bytes_per_transition
from torchbeast.errors import RunError
from torchbeast.fleets.system import check_memory

_AGAIN = "another run with the same name has joined the shared replay: use another --xpid"


class Ticket(NamedTuple):
    """Identifies one session of an agent, which passes it with every call."""

    agent: int  # its number, which stays the same for its name
    joined: int  # different for every session


class SharedReplay:
    """A RolloutReplay for several agents. Any thread may call it.

    Bounds: its memory is the memory of the capacity. When an agent leaves, its walks, and the
    environments whose rollouts may be continued, are dropped.
    """

    def __init__(self, free_memory: Callable[[], int | None]) -> None:
        """Makes a replay without memory. The first agent that joins determines its capacity.

        free_memory: returns the number of free bytes; None: unknown.
        """
        self._free_memory = free_memory
        self._lock = threading.RLock()
        self._replay: RolloutReplay | None = None
        self._first: JoinRequest | None = None
        self._numbers: dict[str, int] = {}  # of agents, by name
        self._joined = itertools.count()
        self._windows: dict[Ticket, Arrays] = {}  # of the agents that have joined

    def join(self, joining: JoinRequest) -> tuple[Ticket, ReplayStats]:
        """Adds an agent, which replaces an earlier agent with the same name.

        The ticket is valid until the agent is replaced or leaves.

        Raises ValueError, with a remedy, if the agent's rollouts do not fit into this replay, or if
        there is not enough memory for the first agent's.
        """
        with self._lock:
            if self._first is None:
                self._replay = self._made_for(joining)
                self._first = joining
            self._first.check_same(joining)
            number = self._numbers.setdefault(joining.name, len(self._numbers))
            for before in [ticket for ticket in self._windows if ticket.agent == number]:
                self._forget(before)
            ticket = Ticket(number, next(self._joined))
            windows = joining.batch(joining.spare_columns)
            self._windows[ticket] = map_leaves(lambda s: np.empty(s.shape, s.dtype), windows)
            return ticket, self.stats()

    def leave(self, ticket: Ticket) -> None:
        """Drops an agent's walks and open rollouts, unless it was replaced. Its episodes stay."""
        with self._lock:
            if ticket in self._windows:
                self._forget(ticket)

    def insert(self, ticket: Ticket, arrays: Arrays) -> ReplayStats:
        """Stores all columns of a batch; raises ValueError if this replay cannot store them.

        arrays: the fields of JoinRequest.batch, and final_observation.
        """
        with self._lock:
            self._check_present(ticket)
            columns = slice(0, arrays["reward"].shape[1])
            self._used.insert(arrays, columns, ticket.agent)
            return self.stats()

    def fill(
        self, ticket: Ticket, first_walk: int | None
    ) -> tuple[ReplayedColumns | None, Arrays, ReplayStats]:
        """Reads windows, see Replay.fill; returns (columns, windows [T+1, S, ...], stats), or
        (None, {}, stats).
        """
        with self._lock:
            self._check_present(ticket)
            windows = self._windows[ticket]
            columns = slice(0, windows["reward"].shape[1])
            filled = read_windows(self._used, ticket.agent, windows, columns, first_walk)
            return filled, {} if filled is None else windows, self.stats()

    def stats(self) -> ReplayStats:
        """Returns metrics for logs and for the agents."""
        with self._lock:
            return self._used.stats()

    def _check_present(self, ticket: Ticket) -> None:
        """Raises RunError if another run has joined under the agent's name."""
        if ticket not in self._windows:
            raise RunError(_AGAIN)

    def _forget(self, ticket: Ticket) -> None:
        del self._windows[ticket]
        self._used.new_source(ticket.agent)
        self._used.forget_walks(ticket.agent)

    @property
    def _used(self) -> RolloutReplay:
        assert self._replay is not None, "no agent has joined"
        return self._replay

    def _made_for(self, joining: JoinRequest) -> RolloutReplay:
        fields = joining.batch(1)
        batches = (joining.columns + joining.spare_columns) * num_bytes(fields)
        each = bytes_per_transition(fields, joining.frame_stack)
        check_memory(joining.replay_size, each, batches, self._free_memory())
        try:
            return RolloutReplay(fields, joining.replay_size, joining.frame_stack, joining.seed)
        except MemoryError as error:
            raise ValueError(f"{error}: use a smaller replay_size") from error


class SharingAgent(ABC):
    """One agent's client of a shared replay; see Replay. Its constructor joins the replay.

    There is a subclass for each transport.
    """

    _stats: ReplayStats

    def __init__(self, joining: JoinRequest) -> None:
        self._fields = tuple(joining.batch(1))

    def stats(self) -> ReplayStats:
        """Returns metrics of the replay, over all agents, when it was last used."""
        return self._stats

    def insert(self, arrays: Arrays, columns: slice, priorities: Priorities | None = None) -> None:
        """Stores columns of a batch; see Replay. priorities: None, because nobody shares a replay
        that samples by them.
        """
        batch: dict[str, Any] = {
            name: map_leaves(lambda leaf: np.ascontiguousarray(leaf[:, columns]), arrays[name])
            for name in self._fields
        }
        batch["final_observation"] = tuple(_finals_of(arrays, columns))
        self._stats = self._ask("insert", batch)

    def fill(
        self, arrays: Arrays, columns: slice, first_walk: int | None
    ) -> ReplayedColumns | None:
        """Writes windows into columns; see Replay."""
        filled: ReplayedColumns | None
        filled, batch, self._stats = self._ask("fill", first_walk)
        for name, nest in batch.items():
            map_leaves2(lambda to, leaf: np.copyto(to[:, columns], leaf), arrays[name], nest)
        if filled is None:
            return None
        # A transport may deliver read-only arrays.
        return filled._replace(finals=[np.array(leaf) for leaf in filled.finals])

    @abstractmethod
    def _ask(self, method: str, argument: Any) -> Any:
        """Returns the result of this method of SharedReplay, for this agent."""


def _finals_of(arrays: Arrays, columns: slice) -> list[np.ndarray]:
    """Returns the final observations that belong to some columns, leaves [K, *shape]."""
    ends = np.concatenate([[0], arrays["truncated"][1:].sum(axis=0).cumsum()])
    own = slice(int(ends[columns.start]), int(ends[columns.stop]))
    return [np.ascontiguousarray(leaf[own]) for leaf in flatten(arrays["final_observation"])]


def has_ended(address: str) -> str:
    """Returns the error message for a shared replay that has ended."""
    return (
        f"the shared replay {address} has ended; progress is saved in the checkpoint. Continue the "
        "sweep that started the replay. Outside a sweep, resume with another --replay_service, or "
        "without one"
    )
