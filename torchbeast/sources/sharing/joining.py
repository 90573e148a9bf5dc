# SPDX-License-Identifier: Apache-2.0
"""The description of its rollouts that an agent sends to a shared replay when it joins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchbeast.core.checks import require
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import map_leaves
from torchbeast.core.storages.stored_rows import described, row_specs

_NUMBERS = ("env_index", "rollout_index")


@dataclass(frozen=True, kw_only=True)
class Joining:
    """An agent's rollouts, and the replay that it expects.

    row: a nest of ArraySpec [*shape] for each field that is stored; stacks are whole.
    """

    name: str  # of the agent's run; a run that joins again under its name is the same agent
    row: Mapping[str, Any]
    unroll_length: int
    frame_stack: int
    capacity: int  # of the replay, in transitions
    columns: int  # of an insertion
    spare_columns: int  # that are filled at once
    seed: int  # of the replay's draws, if this agent is the first

    @property
    def fields(self) -> dict[str, Any]:
        """A nest of ArraySpec [T+1, 1, *shape] for each field, as RolloutReplay takes them."""
        return self.batch(1)

    def batch(self, columns: int) -> dict[str, Any]:
        """Returns a nest of ArraySpec [T+1, columns, *shape] for each field."""
        leading = self.unroll_length + 1, columns
        rows = {**self.row, **{name: ArraySpec((), "int64") for name in _NUMBERS}}
        batch: dict[str, Any] = map_leaves(
            lambda spec: ArraySpec((*leading, *spec.shape), spec.dtype), rows
        )
        return batch

    def check_same(self, other: Joining) -> None:
        """Raises ValueError, naming the difference, unless another agent's rollouts go into the
        replay that this one's decided.
        """
        for flag, mine, theirs in (
            ("--replay_size", self.capacity, other.capacity),
            ("--unroll_length", self.unroll_length, other.unroll_length),
            ("a frame stack", self.frame_stack, other.frame_stack),
        ):
            require(
                mine == theirs,
                f"the shared replay has {flag} {_of(flag, mine)}, this agent {theirs}: {_ALIKE}",
            )
        rows, others = (described(row_specs(each.fields, 1)) for each in (self, other))
        require(
            rows == others,
            f"the shared replay stores rows of {_without(rows, others)}, this agent has "
            f"{_without(others, rows)}: {_ALIKE}",
        )


_ALIKE = (
    "agents that share a replay have the same environment, inputs of the network, --unroll_length "
    "and --replay_size"
)


def joining_of(
    name: str,
    specs: Mapping[str, Any],
    frame_stack: int,
    capacity: int,
    columns: tuple[int, int],
    seed: int,
) -> Joining:
    """Returns how an agent joins whose rollouts have these specs; see `rollout_specs`.

    columns: of an insertion, and that are filled at once.
    """
    return Joining(
        name=name,
        row=row_specs(specs, 1),
        unroll_length=specs["reward"].shape[0] - 1,
        frame_stack=frame_stack,
        capacity=capacity,
        columns=columns[0],
        spare_columns=columns[1],
        seed=seed,
    )


def _of(flag: str, value: int) -> str:
    return f"of {value}" if flag.startswith("a ") else str(value)


def _without(lines: Iterable[str], others: Iterable[str]) -> str:
    return "; ".join(sorted(set(lines) - set(others))) or "nothing more"
