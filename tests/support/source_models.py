# SPDX-License-Identifier: Apache-2.0
"""Models with known outputs; named `source_models:NAME`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for


class CountingNet(ActorCritic):
    """A uniform policy, whatever it observes.

    Its recurrent state is the number of rows since the last end; its value that number times its
    only weight, `scale`.
    """

    def __init__(self, observation_space: Any, action_space: Any, use_lstm: bool) -> None:
        super().__init__()
        self.distribution = distribution_for(action_space)
        self.scale = nn.Parameter(torch.ones(()))

    def initial_state(self, batch_size: int) -> Tensor:
        return torch.zeros(1, batch_size, 1)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        counts, state = [], core_state
        for done in inputs.done.bool():
            state = torch.where(done[None, :, None], 0.0, state) + 1
            counts.append(state[0, :, 0])
        logits = torch.zeros(*inputs.reward.shape, self.distribution.num_params)
        return ModelOutput(logits, torch.stack(counts) * self.scale, state)
