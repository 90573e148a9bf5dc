# SPDX-License-Identifier: Apache-2.0
"""The contract of a model: what it is given and what it returns.

T is time, B is batch. Row t of the inputs is what the environments gave *after* `last_action[t]`;
row t of the outputs is the policy over the next action and the value of that moment. Acting is the
same forward with T = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchbeast.core.losses import RewardClipping
from torchbeast.core.nest_py import Nest


class ModelInputs(NamedTuple):
    """What a model sees, [T, B, ...]."""

    observation: Nest[Tensor]  # leaves [T, B, *shape] in the environment's dtype
    reward: Tensor  # float32 [T, B], as the environment gave it
    done: Tensor  # bool or uint8 [T, B]: the observation is the first of an episode
    last_action: Nest[Tensor]  # leaves [T, B, ...]


class ModelOutput(NamedTuple):
    """What a model says, [T, B, ...]."""

    policy_logits: Tensor  # float32 [T, B, num_params] of the action space's distribution
    baseline: Tensor  # float32 [T, B] the value
    core_state: Nest[Tensor]  # leaves [layers, B, hidden], to be given with the next row


class ActorCritic(nn.Module):
    """A policy and a value function over one observation space and one action space.

    forward neither samples nor keeps anything between calls: given the same weights and inputs it
    returns the same, also while another thread is in it.
    A row whose done is true starts an episode: the state from before is forgotten first, per
    column. Columns do not see each other: the learner may give some at a time.

    compute_dtype: what features may be computed in, set by the program before it learns or acts.
    Outputs and state are float32 in any case.

    reward_input: the form in which `seen_reward` gives rewards to the network, set likewise.
    """

    compute_dtype: torch.dtype = torch.float32
    reward_input: RewardClipping = "abs_one"

    def initial_state(self, batch_size: int) -> Nest[Tensor]:
        """The state at the start, leaves [layers, batch_size, hidden]; () when feed-forward."""
        return ()

    def seen_reward(self, reward: Tensor) -> Tensor:
        """A reward as an input, of the same shape: in [-1, 1] for "abs_one", as in the original's
        networks; for "none" sign(r) log(1 + |r|), which keeps their order and is no larger than 20
        for rewards of hundreds of millions.
        """
        if self.reward_input == "abs_one":
            return reward.clamp(-1.0, 1.0)
        return reward.sign() * reward.abs().log1p()

    def observe(self, observation: Nest[Tensor]) -> None:
        """Counts a batch in the running statistics of observations, where the model has any.

        The learner calls it once for each batch, before it learns from it, and nobody else does.
        Statistics belong in buffers: they are published and saved with the weights, and are as
        before when an update fails. Leaves [T, B, *shape].
        """

    def forward(self, inputs: ModelInputs, core_state: Nest[Tensor]) -> ModelOutput:
        """Policies, values and the state after the last row."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define forward(inputs, core_state)"
        )
