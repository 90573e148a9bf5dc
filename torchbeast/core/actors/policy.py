# SPDX-License-Identifier: Apache-2.0
"""Acting: from a model's output to actions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbeast.core.actors.actor_critic import ActorCritic, ModelInputs
from torchbeast.core.distributions import ActionDistribution
from torchbeast.core.nest_py import Nest

AgentOutput = tuple[Nest[Tensor], Tensor, Tensor]  # action, policy_logits, baseline


@torch.inference_mode()
def act(
    model: ActorCritic,
    distribution: ActionDistribution,
    inputs: ModelInputs,
    core_state: Nest[Tensor],
    *,
    greedy: bool = False,
) -> tuple[AgentOutput, Nest[Tensor]]:
    """((action, policy_logits, baseline), new core_state): a sample, or the mode if greedy.

    No graph is recorded. The results are inference tensors: copy them before learning from them.
    """
    logits, baseline, new_state = model(inputs, core_state)
    action = distribution.mode(logits) if greedy else distribution.sample(logits)
    return (action, logits, baseline), new_state
