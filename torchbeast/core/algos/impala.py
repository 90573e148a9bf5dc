# SPDX-License-Identifier: Apache-2.0
"""IMPALA: actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561).

    total = sum -log pi(a) * advantage + baseline_cost * 0.5 * sum (vs - V)^2 + entropy_cost * sum
    pi log pi

Policy and value of rows 0..T-1 belong to the actions, rewards and dones of rows 1..T; V of row T is
the bootstrap. The entropy covers online steps, not replayed ones. The optimiser is RMSprop as in
PyTorch: epsilon is added to the root and the running square starts at 0. TensorFlow's has epsilon
inside the root and starts at 1, so settings of TensorFlow programs do not carry over as they are.
"""

from __future__ import annotations

from torch import Tensor

from torchbeast.core import losses, vtrace
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import IMPALAConfig
from torchbeast.core.algos.on_policy import OnPolicy
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.losses import Mean
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.rollout import Rollout


class IMPALA(OnPolicy):
    """IMPALA (Espeholt et al. 2018): an actor-critic whose returns V-trace corrects for policy lag.

    It trains on rollouts of any recent policy, in every action space, with feed-forward and
    recurrent networks.

    Args:
        actor: An ActorCritic.
        config: The hyperparameters.

    Example:
        ```python
        IMPALA.create_factory(learning_rate=5e-4, entropy_cost=0.01)
        ```
    """

    Config = IMPALAConfig
    needs = ("policy_logits",)
    corrects_lag = True
    separable = True

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns pg_loss, baseline_loss and entropy_loss, each with its weight, and the mean
        entropy.
        """
        config, distribution = self.config, self.actor.distribution
        unrolled = self.scale.unrolled(unroll(self.actor, minibatch), minibatch)
        policy_logits, values, final_values, state = unrolled
        logits = policy_logits[:-1].float()
        actions = map_leaves(lambda leaf: leaf[1:], minibatch.action)
        log_probs = distribution.log_prob(logits, actions)
        behavior_logits = minibatch.extras["policy_logits"][1:].float()
        mask, metrics = self.learnt_from(minibatch, logits.detach(), behavior_logits)
        behavior_log_probs = distribution.log_prob(behavior_logits, actions)
        rewards, discounts = self.rewards_and_discounts(minibatch, final_values)
        vs, advantages = vtrace.from_importance_weights(
            log_rhos=log_probs - behavior_log_probs,
            discounts=discounts,
            rewards=rewards,
            values=values[:-1],
            bootstrap_value=values[-1],
            mask=mask,
        )
        how, steps, online = self.reduction, minibatch.mask, minibatch.online_mask
        moments = self.scale.moments(vs, minibatch, mask)
        advantages, errors = (
            self.scale.scaled(each, minibatch) for each in (advantages, vs - values[:-1])
        )
        log_probs, errors = losses.masked(log_probs, mask), losses.masked(errors, mask)
        entropies = losses.masked(distribution.entropy(logits), online)
        terms = {
            "pg_loss": losses.policy_gradient_loss(log_probs, advantages, how, steps),
            "baseline_loss": config.baseline_cost * losses.baseline_loss(errors, how, steps),
            "entropy_loss": config.entropy_cost * losses.entropy_loss(entropies, how, steps),
        }
        metrics = {"entropy": losses.mean(entropies, online), **metrics, **moments}
        return Losses(terms, metrics, Feedback(final_state=state))

    def learnt_from(
        self, minibatch: Rollout, logits: Tensor, behavior_logits: Tensor
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        """Returns the states to train policy and value on, and metrics of this choice.

        Args:
            minibatch: Rollouts of T steps in B columns.
            logits: [T, B, num_params] of the policy that is trained.
            behavior_logits: [T, B, num_params] of the policies that acted.

        Returns:
            A bool mask [T, B], or None for all states; and the metrics by name.
        """
        return minibatch.mask, {}
