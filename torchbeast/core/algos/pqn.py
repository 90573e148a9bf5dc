# SPDX-License-Identifier: Apache-2.0
"""PQN: Q(lambda) on new rollouts, without a replay or a target network (Gallici et al. 2024, arXiv
2407.04811).

    G_t = r_t + gamma_t [lambda G_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)]        their equation 3
    loss = mean 0.5 (G_t - Q(s_t, a_t))^2

gamma_t is 0 where the episode ended, and G of row T is max_a Q. Targets are computed once per batch
by the weights before its first optimiser step; several epochs of minibatches train on them. Many
environments replace the replay, and LayerNorm the target network: the networks
of the family "pqn" have one in every hidden layer. Actions are epsilon-greedy, as in DQN.

With V_t = max_a Q(s_t, a) this is the lambda-return of `returns.value_targets`. Actions of older
policies, and random ones, are not corrected for: lambda decides how much they bias the targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from torchbeast.core import losses, returns
from torchbeast.core.actors.contract import ModelInputs, ModelOutput
from torchbeast.core.actors.off_policy import QNetwork, discrete
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import PQNConfig
from torchbeast.core.algos.off_policy import EpsilonGreedy, value_metrics
from torchbeast.core.algos.on_policy import rewards_and_discounts, shuffled
from torchbeast.core.algos.unroll import policies_and_values, unroll
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.storages.rollout import Rollout


class PQN(EpsilonGreedy[Rollout]):
    """Parallelised Q-network (Gallici et al. 2024): Q(lambda) without replay or target network.

    It acts epsilon-greedily in Discrete action spaces, and trains on rollouts of many environments.

    Args:
        actor: A QNetwork, for example the built-in pqn-mlp.
        config: The hyperparameters.

    Example:
        ```python
        PQN.create_factory(learning_rate=5e-4, q_lambda=0.65, num_epochs=2, num_mini_batch=4)
        ```
    """

    Config = PQNConfig
    family = "pqn"
    actor_type: ClassVar = QNetwork
    actor: QNetwork
    config: PQNConfig

    def prepare(self, batch: Rollout) -> Rollout:
        """Adds value_targets to the extras, [T+1, B] like the actions that they belong to."""
        _, values, final_values, _ = unroll(self._model, batch)
        targets = returns.value_targets(
            **rewards_and_discounts(self.config, batch, final_values),
            values=values[:-1],
            bootstrap_value=values[-1],
            lambda_=self.config.q_lambda,
            mask=batch.mask,
        )
        return batch.with_extras(value_targets=targets)

    def minibatches(self, batch: Rollout) -> Iterator[Rollout]:
        """Yields num_mini_batch parts of the batch's steps for each epoch, shuffled again."""
        for _ in range(self.config.num_epochs):
            yield from shuffled(batch, self.config.num_mini_batch)

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns value_loss, and as metrics the mean value and the mean absolute error."""
        q_values, _ = policies_and_values(self._model, minibatch)
        actions = map_leaves(lambda leaf: leaf[1:], minibatch.action)
        values = discrete(self.actor).chosen(q_values, actions)
        errors = minibatch.extras["value_targets"][1:].float() - values
        mask = minibatch.mask
        terms = {"value_loss": losses.baseline_loss(errors, self.reduction, mask)}
        return Losses(terms, value_metrics(values, errors, mask))

    def _model(self, inputs: ModelInputs, state: Nest[Tensor]) -> ModelOutput:
        """Returns Q [T', B, n] in place of policies, and as values max_a Q, both float32."""
        flat: Nest[Tensor] = map_leaves(lambda leaf: leaf.flatten(0, 1), inputs.observation)
        q_values = self.actor(flat).float().view(*inputs.reward.shape, -1)
        return ModelOutput(q_values, q_values.amax(-1), state)
