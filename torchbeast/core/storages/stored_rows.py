# SPDX-License-Identifier: Apache-2.0
"""The part of a row that a replay stores, and the memory it takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torchbeast.core.checks import at_least
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages import episodes
from torchbeast.core.storages.chunk_ring import row_bytes
from torchbeast.core.storages.frame_stacks import frame_spec

_NOT_STORED = ("initial_agent_state", "final_observation", "env_index", "rollout_index", "info")


def row_specs(fields: Mapping[str, Any], frame_stack: int) -> dict[str, Any]:
    """Returns what is stored of a row: a nest of ArraySpec for each field.

    fields: a nest of ArraySpec [T+1, B, *shape] for each field of Rollout. frame_stack: number of
    frames in every leaf of an observation, of which one is stored.

    Raises ValueError when a leaf cannot be a stack of so many frames.
    """
    at_least(1, frame_stack=frame_stack)
    rows: dict[str, Any] = {
        name: map_leaves(lambda spec: ArraySpec(spec.shape[2:], spec.dtype), nest)
        for name, nest in fields.items()
        if name not in _NOT_STORED
    }
    stacks = rows["observation"]
    rows["observation"] = map_leaves(lambda stack: frame_spec(stack, frame_stack), stacks)
    return rows


def bytes_per_transition(fields: Mapping[str, Any], frame_stack: int) -> int:
    """Returns the bytes of memory that a stored transition takes at most, without those of
    `bytes_per_truncation`. The arguments are those of `row_specs`.
    """
    return row_bytes(flatten(row_specs(fields, frame_stack))) + episodes.BYTES_PER_ROW


def bytes_per_truncation(fields: Mapping[str, Any], frame_stack: int) -> int:
    """Returns the bytes of the frames of a final observation, which each stored truncation takes
    besides. The arguments are those of `row_specs`.
    """
    return row_bytes(flatten(row_specs(fields, frame_stack)["observation"]))


def described(rows: Mapping[str, Any]) -> list[str]:
    """Returns a line for each leaf of `row_specs`, such as "action int64 []"; two lists are equal
    if the same bytes mean the same in both.
    """
    return [
        f"{name} {leaf.dtype} {list(leaf.shape)} {sys.byteorder}-endian"
        for name, nest in sorted(rows.items())
        for leaf in flatten(nest)
    ]
