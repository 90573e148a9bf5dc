# SPDX-License-Identifier: Apache-2.0
"""Synthetic data for an environment's spaces: inference inputs and training batches.

E is the number of environments, T the unroll length, B the batch size. `space` is of one
environment, as the policy sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchbeast.core.actors.actor_critic import ModelInputs
from torchbeast.core.actors.agent import Agent
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace
from torchbeast.core.nest_py import Nest, map_leaves
from torchbeast.core.storages.rollout import Rollout

_ENDS = 0.002  # an episode ends every 500 steps


def observations(space: ObservationSpace, *shape: int) -> Nest[Tensor]:
    """Leaves [*shape, ...]."""
    made: Nest[Tensor] = map_leaves(lambda spec: _observation(spec, shape), space)
    return made


def model_inputs(agent: Agent, space: ObservationSpace, num_envs: int) -> ModelInputs:
    """One row, [1, E, ...]."""
    shape = (1, num_envs)
    return ModelInputs(
        observations(space, *shape),
        torch.zeros(shape),
        torch.rand(shape) < _ENDS,
        agent.distribution.zero_action(shape),
    )


def inference_request(agent: Agent, space: ObservationSpace, num_envs: int) -> Any:
    """The inputs of one PolyBeast inference batch (sources/servers/inference.py), [1, E, ...]."""
    inputs, counters = model_inputs(agent, space, num_envs), torch.zeros(1, num_envs)
    env = inputs.observation, inputs.reward, inputs.done, counters.int(), counters
    return env, (agent.model.initial_state(num_envs), inputs.last_action)


def rollout(agent: Agent, space: ObservationSpace, unroll_length: int, batch_size: int) -> Rollout:
    """A batch [T+1, B, ...] without truncations."""
    shape = (unroll_length + 1, batch_size)
    policy_logits = torch.zeros(*shape, agent.distribution.num_params)
    done = torch.rand(shape) < _ENDS
    return Rollout(
        observation=observations(space, *shape),
        reward=torch.randn(shape),
        done=done,
        episode_step=torch.zeros(shape, dtype=torch.int32),
        episode_return=torch.zeros(shape),
        action=agent.distribution.sample(policy_logits),
        policy_logits=policy_logits,
        baseline=torch.zeros(shape),
        initial_agent_state=agent.model.initial_state(batch_size),
        truncated=torch.zeros(shape, dtype=torch.bool),
        episode_end=done,
        policy_version=torch.zeros(shape, dtype=torch.int64),
        final_observation=observations(space, 0),
    )


def _observation(spec: ArraySpec, shape: tuple[int, ...]) -> Tensor:
    """All values of bytes; of other types, which may stand for anything, small ones."""
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(*shape, *spec.shape).to(dtype)
    return torch.randint(256 if spec.dtype == "uint8" else 2, (*shape, *spec.shape)).to(dtype)
