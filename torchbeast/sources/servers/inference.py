# SPDX-License-Identifier: Apache-2.0
"""What PolyBeast's inference threads answer: actions for one batch of environments."""

from __future__ import annotations

from typing import Any

from torchbeast.core.actors.actor_critic import ActorCritic, ModelInputs
from torchbeast.core.actors.policy import act
from torchbeast.core.cuda_stream import CudaStream
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.nest_py import map_leaves


def answer(
    replica: ActorCritic, distribution: ActionDistribution, cuda_stream: CudaStream, inputs: Any
) -> Any:
    """`((action, policy_logits, baseline), (core_state, action))` for one batch, on the CPU.

    inputs: `((observation, reward, done, episode_step, episode_return), (core_state, last_action))`
    as the core asks, leaves [1, B, ...] and [layers, B, ...]. `replica` is on the stream's device.
    """
    (observation, reward, done, _, _), (core_state, last_action) = inputs
    seen = (observation, reward, done, last_action), core_state
    model_inputs, state = map_leaves(cuda_stream.to_device, seen)
    agent, new_state = act(replica, distribution, ModelInputs(*model_inputs), state)
    action, *others, new_state = map_leaves(cuda_stream.to_host, (*agent, new_state))
    cuda_stream.synchronize()
    return (action, *others), (new_state, action)
