# SPDX-License-Identifier: Apache-2.0
"""Shapes and dtypes of rollouts, before there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import specs_of_extras
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.chunk_ring import row_bytes


class RolloutSpec(NamedTuple):
    """What the rollouts of an agent hold, and how long they are."""

    agent: Agent
    extras: Sequence[str]  # names of the outputs of acting that are kept beside the actions
    unroll_length: int  # T
    info_keywords: Sequence[str] = ()  # see VecEnv.create_factory

    def fields(self, columns: int = 1) -> dict[str, Any]:
        """Returns a nest of ArraySpec `[T+1, columns, ...]` for every field of Rollout except
        final_observation, which has a row for each truncation.
        """

        def spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
            return ArraySpec((self.unroll_length + 1, columns, *shape), dtype)

        actor, space = self.agent.model, self.agent.observation_space
        action = actor.distribution.zero_action((1, columns))
        given = specs_of_extras(actor, self.extras)
        return {
            "observation": map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), space),
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
            "info": {name: spec((), "float32") for name in self.info_keywords},
            "initial_agent_state": map_leaves(
                lambda leaf: ArraySpec(tuple(leaf.shape), _dtype(leaf)),
                actor.initial_state(columns),
            ),
        }

    def num_bytes(self, columns: int = 1) -> int:
        """Returns the bytes of a batch of rollouts, without final observations."""
        return row_bytes(flatten(self.fields(columns)))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")  # of a GPU's tensors too
