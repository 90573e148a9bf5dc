# SPDX-License-Identifier: Apache-2.0
"""R2D2: recurrent replay distributed DQN (Kapturowski, Ostrovski, Quan, Munos, Dabney 2019).

    y_t = h(sum_{k<n} gamma^k r_{t+k} + gamma^n h^-1(Q_target(s_{t+n}, argmax_a Q(s_{t+n}, a))))
    loss = mean w 0.5 (y_t - Q(s_t, a_t))^2                                  their section 2.3
    h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x              Pohlen et al. 2018, arXiv 1805.11593
    p = eta max_t |y_t - Q(s_t, a_t)| + (1 - eta) mean_t |y_t - Q(s_t, a_t)|

A rollout begins with the recurrent state that was stored when it was played. Both networks run from
there over its first burn_in steps without training, and the other steps are trained on. A batch has
new rollouts, each once, and replayed ones, drawn by priority p with importance weights w.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from torchbeast.core import losses, returns
from torchbeast.core.actors.contract import ModelInputs, ModelOutput
from torchbeast.core.actors.networks import pair_of
from torchbeast.core.actors.off_policy import CORE_STATE, RecurrentQNetwork, discrete
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import R2D2Config
from torchbeast.core.algos.off_policy import WithTarget, value_metrics
from torchbeast.core.algos.on_policy import rewards_and_discounts
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.losses import masked
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.rollout import Rollout

_EPS, _ETA = 1e-3, 0.9


def rescaled(x: Tensor) -> Tensor:
    """Returns h(x) of any shape."""
    return x.sign() * ((x.abs() + 1.0).sqrt() - 1.0) + _EPS * x


def unscaled(x: Tensor) -> Tensor:
    """Returns h^-1(x) of any shape, in a form that does not subtract numbers of similar size."""
    z = x.abs() + 1.0 + _EPS
    return x.sign() * ((2.0 * z / (1.0 + (1.0 + 4.0 * _EPS * z).sqrt())).square() - 1.0)


class R2D2(WithTarget[Rollout]):
    """R2D2 (Kapturowski et al. 2019): double Q-learning with memory, from rollouts of a replay.

    It acts epsilon-greedily in Discrete action spaces.

    Args:
        actor: A RecurrentQNetwork, for example the built-in r2d2-mlp.
        config: The hyperparameters.

    Example:
        ```python
        R2D2.create_factory(learning_rate=5e-4, burn_in=10)
        ```
    """

    Config = R2D2Config
    family = "r2d2"
    actor_type: ClassVar = RecurrentQNetwork
    learns_from_replay = True
    burns_in = True
    needs = (CORE_STATE,)
    actor: RecurrentQNetwork
    config: R2D2Config

    def prepare(self, batch: Rollout) -> Rollout:
        """Excludes burn-in from training."""
        rows = torch.arange(len(batch.reward), device=batch.reward.device).unsqueeze(1)
        trained = (rows > self.config.burn_in).expand_as(batch.done)
        valid = losses.both(batch.valid, trained)
        return dataclasses.replace(batch, valid=valid, collected=batch.env_steps)

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns value_loss, the mean value and the mean absolute TD error as metrics, both of
        rescaled values, and the priorities.
        """
        state = self.actor.state_of(minibatch.extras[CORE_STATE][0])
        begun = dataclasses.replace(minibatch, initial_agent_state=(state, state))
        q_values, values, final_values, _ = unroll(self._double_q, begun, self.config.burn_in)
        targets = self._targets(minibatch, values, final_values)
        actions = map_leaves(lambda leaf: leaf[1:], minibatch.action)
        chosen = discrete(self.actor).chosen(q_values[:-1].float(), actions)
        mask, weights = minibatch.mask, minibatch.weights
        errors = masked(targets - chosen, mask)
        weighted = errors if weights is None else errors * weights[1:].sqrt()
        metrics = value_metrics(chosen, errors, mask)
        terms = {"value_loss": losses.baseline_loss(weighted, self.reduction, mask)}
        return Losses(terms, metrics, Feedback(priorities=self._priorities(errors, mask)))

    def _double_q(self, inputs: ModelInputs, state: Nest[Tensor]) -> ModelOutput:
        """Runs the network and the target network; the baseline is what the second says of the
        actions that the first rates highest. state: of both.
        """
        own, others = pair_of(state)
        q_values, _, own = self.actor(inputs, own)
        with torch.no_grad():
            rated, _, others = self.target.network(inputs, others)
            best = rated.gather(-1, q_values.argmax(-1, keepdim=True)).squeeze(-1)
        return ModelOutput(q_values, best, (own, others))

    def _targets(self, minibatch: Rollout, values: Tensor, final_values: Tensor) -> Tensor:
        """Returns y [T, B] by the rescaled values [T+1, B] and those of final observations [T, B],
        which are 0 where no episode was truncated.
        """
        inputs = rewards_and_discounts(self.config, minibatch, unscaled(final_values))
        targets = returns.n_step_targets(
            **inputs, values=unscaled(values.float()), n=self.n_step, mask=minibatch.mask
        )
        return rescaled(targets)

    @torch.no_grad()
    def _priorities(self, errors: Tensor, mask: Tensor | None) -> Tensor:
        """Returns p [B] of errors [T, B], which are 0 where the mask is false."""
        count = len(errors) if mask is None else mask.sum(0).clamp(min=1)
        sizes = errors.abs()
        return _ETA * sizes.amax(0) + (1.0 - _ETA) * sizes.sum(0) / count
