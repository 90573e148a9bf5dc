# SPDX-License-Identifier: Apache-2.0
"""What an agent tells a shared replay when it joins, and the checks of it.

All of it is JSON. The service trusts none of it: every number has limits, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.chunk_ring import row_bytes
from torchbeast.core.storages.stored_rows import described, row_specs

_LONGEST_NAME = 500
_MOST = 2**31 - 1  # of anything that is counted
_MOST_LEAVES = 1000
_MOST_DIMENSIONS = 32
_MOST_ROW_BYTES = 2**31
_DTYPES = "biuf"  # kinds of numpy's dtypes: bool, integers, floats

# The fields of a row whose leaf is known beforehand; those of the others depend on the agent.
_FLAT = {
    "reward": "float32",
    "done": "bool",
    "truncated": "bool",
    "episode_end": "bool",
    "episode_step": "int32",
    "episode_return": "float32",
    "policy_version": "int64",
}
_NESTED = ("observation", "action", "extras")
_NUMBERS = ("env_index", "rollout_index")


@dataclass(frozen=True, kw_only=True)
class Joining:
    """An agent's rollouts, and the replay that it expects.

    row: a nest of ArraySpec [*shape] for each field that is stored; stacks are whole.
    """

    name: str  # of the agent's run: who joins again under a name goes on as the same agent
    row: Mapping[str, Any]
    unroll_length: int
    frame_stack: int
    capacity: int  # of the replay, in transitions
    columns: int  # of an insertion
    spare_columns: int  # that are filled at once
    seed: int  # of the replay's draws, if this agent is the first

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, unless all values are within their limits."""
        require(
            isinstance(self.name, str) and 0 < len(self.name) <= _LONGEST_NAME,
            f"name must be a text of 1 to {_LONGEST_NAME} letters",
        )
        for name in ("unroll_length", "frame_stack", "capacity", "columns", "spare_columns"):
            _check_number(name, getattr(self, name), 1)
        _check_number("seed", self.seed, 0)
        _check_row(self.row)

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

    def finals(self, count: int) -> list[ArraySpec]:
        """Returns the leaves [count, *shape] of so many final observations."""
        leaves = flatten(self.row["observation"])
        return [ArraySpec((count, *spec.shape), spec.dtype) for spec in leaves]

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

    def as_json(self) -> dict[str, Any]:
        """Returns JSON from which `from_json` makes an equal one."""
        return {**vars(self), "row": {name: _to_json(nest) for name, nest in self.row.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Joining:
        """Parses the result of `as_json`; raises ValueError for anything else."""
        try:
            row = {name: _from_json(nest) for name, nest in data["row"].items()}
            return cls(**{**data, "row": row})
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError(f"the agent does not say how it joins: {error!r}") from None


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


def _check_number(name: str, value: Any, least: int) -> None:
    is_valid = type(value) is int and least <= value <= _MOST
    require(is_valid, f"{name} must be a number from {least} to {_MOST}, got {value!r}")


def _check_row(row: Mapping[str, Any]) -> None:
    needed = sorted([*_FLAT, *_NESTED])
    require(sorted(row) == needed, f"a row needs the fields {needed}, got {sorted(row)}")
    for name, dtype in _FLAT.items():
        require(row[name] == ArraySpec((), dtype), f"{name} must be one {dtype}, got {row[name]}")
    leaves = flatten(row)
    require(len(leaves) <= _MOST_LEAVES, f"a row of {len(leaves)} leaves has too many")
    size = row_bytes(leaves)
    require(size <= _MOST_ROW_BYTES, f"a row of {size} bytes is too large")


def _to_json(nest: Any) -> Any:
    """Returns a nest of ArraySpec as JSON: a leaf and a tuple are lists that begin with a name."""
    if isinstance(nest, tuple):
        return ["tuple", *map(_to_json, nest)]
    if isinstance(nest, dict):
        return {key: _to_json(value) for key, value in nest.items()}
    return ["array", nest.dtype, *nest.shape]


def _from_json(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _from_json(value) for key, value in data.items()}
    kind, *entries = data
    if kind == "tuple":
        return tuple(map(_from_json, entries))
    require(kind == "array", f"a nest has arrays and tuples, not {kind!r}")
    dtype, *shape = entries
    require(len(shape) <= _MOST_DIMENSIONS, f"an array of {len(shape)} dimensions has too many")
    for length in shape:
        _check_number("the length of an array", length, 1)
    is_known = isinstance(dtype, str) and np.dtype(dtype).kind in _DTYPES
    require(is_known and np.dtype(dtype).name == dtype, f"there are no arrays of {dtype!r}")
    return ArraySpec(tuple(shape), dtype)


def _of(flag: str, value: int) -> str:
    return f"of {value}" if flag.startswith("a ") else str(value)


def _without(lines: Iterable[str], others: Iterable[str]) -> str:
    return "; ".join(sorted(set(lines) - set(others))) or "nothing more"
