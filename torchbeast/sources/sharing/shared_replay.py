# SPDX-License-Identifier: Apache-2.0
"""A replay that several agents insert into and sample from, without any transport.

    agent 0 --- insert ---> one ring, first in first out <--- insert --- agent 1
            <-- windows --- drawn from the episodes of all --- windows -->

The first agent decides what a row is and how many there are. An agent that leaves, or dies, leaves
its episodes; what it joins with again under its name follows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.nest_py import flatten
from torchbeast.core.storages.chunk_ring import row_bytes
from torchbeast.core.storages.rollout_replay import RolloutReplay
from torchbeast.core.storages.stored_rows import bytes_per_transition
from torchbeast.processes.memory import check_memory, in_bytes
from torchbeast.sources.replay import Arrays, Filled, read_windows
from torchbeast.sources.sharing.joining import Joining

AGAIN = "another run with the same name has joined the shared replay: give each its own --xpid"

_MOST_AGENTS = 10_000  # names that a replay remembers
_MOST_ENVIRONMENTS = 100_000  # of an agent


class Figures(NamedTuple):
    """What agents are told with every answer."""

    fill: float  # share of the memory in use
    samples_per_insert: float  # steps read per step inserted, by all agents since the beginning
    size: int  # stored transitions
    episodes: int  # that can be sampled


class SharedReplay:
    """A RolloutReplay with agents. One thread makes all calls; agents are named by numbers.

    Bounds: memory is that of the capacity. An agent's walks, and the environments whose rollouts
    may be continued, are forgotten when it leaves.
    """

    def __init__(self, free_memory: Callable[[], int | None]) -> None:
        """Makes a replay without memory; the first agent that joins decides how much it has.

        free_memory: returns the bytes that are free; None: unknown.
        """
        self._free_memory = free_memory
        self._replay: RolloutReplay | None = None
        self._first: Joining | None = None
        self._numbers: dict[str, int] = {}  # of agents, by name
        self._environments: dict[int, set[int]] = {}  # seen, by agent

    @property
    def agents(self) -> dict[str, int]:
        """The numbers of all agents that have joined, by name."""
        return dict(self._numbers)

    def join(self, joining: Joining) -> int:
        """Adds an agent; returns its number, which is the same for the same name.

        Raises ValueError, with what to do, when its rollouts do not go into this replay, and when
        the memory is not there.
        """
        require(
            joining.name in self._numbers or len(self._numbers) < _MOST_AGENTS,
            f"{_MOST_AGENTS} agents have joined this replay already: start another one",
        )
        if self._first is None:
            self._replay = self._made_for(joining)
            self._first = joining
        self._first.check_same(joining)
        number = self._numbers.setdefault(joining.name, len(self._numbers))
        self.leave(number)  # what it left, if it died unnoticed
        return number

    def check_room(self, size: int) -> None:
        """Raises ValueError when the batches of one more agent, of so many bytes, do not fit the
        memory that is free, beside what the replay takes of it while it fills.
        """
        free, later = self._free_memory(), self._not_yet_taken()
        require(
            free is None or size + later <= free,
            f"the batches of one agent need {in_bytes(size)} of memory, but {in_bytes(free or 0)} "
            f"are free, {in_bytes(later)} of them for the replay: give a smaller --batch_size, "
            "--replay_ratio or --replay_size",
        )

    def leave(self, agent: int) -> None:
        """Forgets an agent's walks, and what its rollouts would follow. Its episodes stay."""
        self._environments.pop(agent, None)
        self._used.new_source(agent)
        self._used.forget_walks(agent)

    def insert(self, agent: int, arrays: Arrays) -> None:
        """Stores all columns of a batch.

        arrays: the fields of Joining.batch, and final_observation. Nobody changes them meanwhile.

        Raises ValueError when they are no rollouts that this replay stores.
        """
        _check_bools(arrays)
        environments = self._environments.get(agent, set()).union(arrays["env_index"][0].tolist())
        require(
            len(environments) <= _MOST_ENVIRONMENTS,
            f"an agent has at most {_MOST_ENVIRONMENTS} environments",
        )
        self._environments[agent] = environments
        self._used.insert(arrays, slice(0, arrays["reward"].shape[1]), agent)

    def fill(self, agent: int, arrays: Arrays, first_walk: int | None) -> Filled | None:
        """Writes a window into every column; see Replay.fill."""
        columns = slice(0, arrays["reward"].shape[1])
        return read_windows(self._used, agent, arrays, columns, first_walk)

    def figures(self) -> Figures:
        """Returns figures for logs and for the agents."""
        return Figures(*self._used.facts(), self._used.size, self._used.episodes)

    @property
    def _used(self) -> RolloutReplay:
        assert self._replay is not None, "no agent has joined"
        return self._replay

    def _not_yet_taken(self) -> int:
        """Returns the bytes that the replay has reserved, but not written to."""
        if (replay := self._replay) is None:
            return 0
        return int((1 - replay.facts().fill) * replay.capacity * replay.bytes_per_transition)

    def _made_for(self, joining: Joining) -> RolloutReplay:
        each = bytes_per_transition(joining.fields, joining.frame_stack)
        columns = joining.columns + joining.spare_columns
        region = columns * row_bytes(flatten(joining.fields))
        check_memory(joining.capacity, each, region, self._free_memory())
        try:
            return RolloutReplay(
                joining.fields, joining.capacity, joining.frame_stack, joining.seed
            )
        except MemoryError as error:
            raise ValueError(f"{error}: give a smaller --replay_size") from error


def _check_bools(arrays: Mapping[str, Any]) -> None:
    """Raises ValueError where a byte of a bool is neither 0 nor 1: numpy would count it wrongly."""
    for leaf in flatten(arrays):
        if leaf.dtype == np.bool_:
            require(bool((leaf.view(np.uint8) <= 1).all()), "a bool is neither 0 nor 1")
