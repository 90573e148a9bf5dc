# SPDX-License-Identifier: Apache-2.0
"""What PolyBeast's inference threads answer: actions for one batch of environments."""

from __future__ import annotations

from typing import Any

import torch

from torchbeast.core.actors.actor_critic import ActorCritic, ModelInputs
from torchbeast.core.actors.policy import act
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.nest_py import map_leaves


def answer(
    replica: ActorCritic, distribution: ActionDistribution, device: torch.device, inputs: Any
) -> Any:
    """`((action, policy_logits, baseline), (core_state, action))` for one batch, on the CPU.

    inputs: `((observation, reward, done, episode_step, episode_return), (core_state, last_action))`
    as the core asks, leaves [1, B, ...] and [layers, B, ...]. `replica` is on `device`.
    """
    env, (core_state, last_action) = map_leaves(lambda leaf: leaf.to(device), inputs)
    observation, reward, done, _, _ = env
    model_inputs = ModelInputs(observation, reward, done, last_action)
    agent, new_state = act(replica, distribution, model_inputs, core_state)
    return map_leaves(lambda leaf: leaf.cpu(), (agent, (new_state, agent[0])))
