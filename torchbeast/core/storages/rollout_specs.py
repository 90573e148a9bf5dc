# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of a batch of rollouts, before there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchbeast.core.actors.contract import Actor, specs_of_extras
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.chunk_ring import row_bytes


def rollout_specs(
    actor: Actor,
    observation_space: ObservationSpace,
    extras: Sequence[str],
    unroll_length: int,
    columns: int,
    info_keywords: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns a nest of ArraySpec for every field of Rollout except final_observation.

    observation_space: that of one environment, as the policy sees it.
    info_keywords: see VecEnv.create_factory.
    """

    def spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
        return ArraySpec((unroll_length + 1, columns, *shape), dtype)

    action = actor.distribution.zero_action((1, columns))
    given = specs_of_extras(actor, extras)
    return {
        "observation": map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), observation_space),
        "reward": spec((), "float32"),
        "done": spec((), "bool"),
        "truncated": spec((), "bool"),
        "episode_end": spec((), "bool"),
        "episode_step": spec((), "int32"),
        "episode_return": spec((), "float32"),
        "action": map_leaves(lambda leaf: spec(leaf.shape[2:], _dtype(leaf)), action),
        "extras": map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), given),
        "policy_version": spec((), "int64"),
        "env_index": spec((), "int64"),
        "rollout_index": spec((), "int64"),
        "info": {name: spec((), "float32") for name in info_keywords},
        "initial_agent_state": map_leaves(
            lambda leaf: ArraySpec(tuple(leaf.shape), _dtype(leaf)),
            actor.initial_state(columns),
        ),
    }


def rollout_bytes(
    actor: Actor,
    observation_space: ObservationSpace,
    extras: Sequence[str],
    unroll_length: int,
    columns: int,
    info_keywords: Sequence[str] = (),
) -> int:
    """Returns the bytes of a batch of rollouts, without final observations.

    The arguments are those of `rollout_specs`.
    """
    shape = actor, observation_space, extras, unroll_length, columns
    specs = rollout_specs(*shape, info_keywords)
    return row_bytes(flatten(specs))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")  # of a GPU's tensors too
