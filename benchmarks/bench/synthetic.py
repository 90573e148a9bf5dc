# SPDX-License-Identifier: Apache-2.0
"""Synthetic data for an environment's spaces: inference inputs and training batches.

E is the number of environments, T the unroll length, B the batch size. `space` describes one
environment's observation as the policy sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Agent, ModelInputs, has_mask, specs_of_extras
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.envs.contract import MASK
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace
from torchbeast.core.storages.rollout import Rollout

_ENDS = 0.002  # probability that an episode ends at a step


def observations(space: ObservationSpace, *shape: int) -> Nest[Tensor]:
    """Returns random observations, leaves [*shape, ...], that mask no action."""
    made: Nest[Tensor] = map_leaves(lambda spec: _observation(spec, shape), space)
    if has_mask(made):
        made = {**made, MASK: torch.ones_like(made[MASK])}
    return made


def model_inputs(agent: Agent, space: ObservationSpace, num_envs: int) -> ModelInputs:
    """Returns random inputs of the model for one row, [1, E, ...]."""
    shape = (1, num_envs)
    return ModelInputs(
        observations(space, *shape),
        torch.zeros(shape),
        torch.rand(shape) < _ENDS,
        agent.model.distribution.zero_action(shape),
    )


def inference_request(agent: Agent, space: ObservationSpace, num_envs: int) -> Any:
    """Returns the inputs of one inference batch (see servers/source.py), [1, E, ...]."""
    inputs, counters = model_inputs(agent, space, num_envs), torch.zeros(1, num_envs)
    env = inputs.observation, inputs.reward, inputs.done, counters.int(), counters
    numbers = torch.arange(1, num_envs + 1).unsqueeze(0)
    return env, (agent.model.initial_state(num_envs), inputs.last_action, numbers)


def rollout(
    agent: Agent,
    space: ObservationSpace,
    unroll_length: int,
    batch_size: int,
    extras: Sequence[str],
    spare_columns: int = 0,
) -> Rollout:
    """Returns a random batch [T+1, B + spare_columns, ...] without truncations.

    The actions are uniform. extras: names of the actor's extras it contains, all zeros.
    spare_columns: number of columns that are marked as replayed.
    """
    columns = batch_size + spare_columns
    shape = (unroll_length + 1, columns)
    distribution = agent.model.distribution
    specs = specs_of_extras(agent.model, extras)
    done = torch.rand(shape) < _ENDS
    return Rollout(
        observation=observations(space, *shape),
        reward=torch.randn(shape),
        done=done,
        episode_step=torch.ones(shape, dtype=torch.int32),
        episode_return=torch.zeros(shape),
        action=distribution.sample(torch.zeros(*shape, distribution.num_params)),
        extras={name: torch.zeros(*shape, *spec.shape) for name, spec in specs.items()},
        initial_agent_state=agent.model.initial_state(columns),
        truncated=torch.zeros(shape, dtype=torch.bool),
        episode_end=done,
        policy_version=torch.zeros(shape, dtype=torch.int64),
        final_observation=observations(space, 0),
        env_index=torch.arange(columns).repeat(unroll_length + 1, 1),
        rollout_index=torch.zeros(shape, dtype=torch.int64),
        replayed=(torch.arange(columns) >= batch_size).repeat(unroll_length + 1, 1)
        if spare_columns
        else None,
    )


def _observation(spec: ArraySpec, shape: tuple[int, ...]) -> Tensor:
    """Returns random bytes; for other types, whose meaning is unknown, small numbers."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(*shape, *spec.shape).to(dtype)
    return torch.randint(256 if spec.dtype == "uint8" else 2, (*shape, *spec.shape)).to(dtype)
