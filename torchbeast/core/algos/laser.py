# SPDX-License-Identifier: Apache-2.0
"""LASER: IMPALA that also learns from replay (Schmitt, Hessel, Simonyan 2019, arXiv 1909.11583).

From steps of a behaviour policy mu, V-trace with the limit rho_bar learns the value of neither mu
nor the target policy pi, but of the *implied policy*

    pi~_mu(a) = min(rho_bar mu(a), pi(a)) / Z,        Z = sum_b min(rho_bar mu(b), pi(b))

A replayed state s is relevant, and learnt from, only where KL(pi(.|s) || pi~_mu(.|s)) is small. An
irrelevant state has no gradient, and the returns of the states before it stop there and bootstrap
from its value. LASER chooses among states, never among actions: that would change the distribution
that the actions were drawn from. Online states are treated as in IMPALA.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.distributions import MOST_ACTIONS
from torchbeast.core.algos.config import LASERConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.losses import Mean, both, mean
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError


@torch.no_grad()
def implied_policy_kl(
    target_log_probs: Tensor, behavior_log_probs: Tensor, rho_bar: float = 1.0
) -> Tensor:
    """Returns beta, KL(pi || pi~_mu) in nats, float32 [...], at least 0, without a graph.

        beta = sum_a pi(a) log(pi(a) / pi~_mu(a))
             = log Z + sum_a pi(a) relu(log pi(a) - log mu(a) - log rho_bar)

    since log pi - log min(rho_bar mu, pi) is 0 where rho_bar mu is larger. The minimum does not
    factorise over the choices of a joint action, so all joint actions are needed.

    Args:
        target_log_probs: [..., A] log pi of all actions, normalised; see
            ActionDistribution.all_log_probs. -inf: the policy never takes that action.
        behavior_log_probs: [..., A] log mu of all actions, likewise normalised.
        rho_bar: V-trace's limit of the importance weights, above 0.

    Returns:
        beta; inf where pi takes an action that mu never takes.
    """
    log_pi, limit = target_log_probs.float(), behavior_log_probs.float() + math.log(rho_bar)
    pi = log_pi.exp()
    unlearnable = (pi * (log_pi - limit).relu().masked_fill(pi == 0, 0.0)).sum(-1)
    log_z = torch.minimum(log_pi, limit).logsumexp(-1)
    # For policies without a common action, log Z is -inf and the sum inf.
    return (log_z + unlearnable).clamp(min=0.0).masked_fill(unlearnable.isposinf(), math.inf)


class LASER(IMPALA):
    """LASER (Schmitt et al. 2019): IMPALA that also trains on replayed rollouts, in a trust region.

    It needs action spaces whose joint actions can be enumerated, unless replay_kl_threshold is inf.

    Args:
        actor: An ActorCritic.
        config: The hyperparameters.

    Example:
        ```python
        LASER.create_factory(learning_rate=5e-4, replay_kl_threshold=0.1)
        ```
    """

    Config = LASERConfig
    learns_from_replay = True
    config: LASERConfig

    @classmethod
    def check_actor(cls, actor: Actor, config: LASERConfig) -> None:
        """Checks in addition that the trust region can be computed.

        Args:
            actor: The network to train.
            config: The hyperparameters.

        Raises:
            UsageError: If there is a trust region, and the actions cannot be enumerated.
        """
        super().check_actor(actor, config)
        if not (actor.distribution.is_enumerable or math.isinf(config.replay_kl_threshold)):
            raise UsageError(
                f"{cls.__name__} needs the probabilities of all actions to tell which replayed "
                "states are relevant, but some are continuous, or there are more than "
                f"{MOST_ACTIONS:,} joint actions: use replay_kl_threshold inf to train on all "
                "states, or another algorithm"
            )

    def learnt_from(
        self, minibatch: Rollout, logits: Tensor, behavior_logits: Tensor
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        """Chooses the online states and the relevant replayed states.

        Args:
            minibatch: Rollouts of T steps in B columns.
            logits: [T, B, num_params] of the policy that is trained.
            behavior_logits: [T, B, num_params] of the policies that acted.

        Returns:
            A bool mask [T, B], or None for all states; and two metrics: the share of replayed
            states that are relevant, and the mean KL(policy || implied policy) in nats where it is
            finite.
        """
        replayed, distribution = minibatch.replayed_mask, self.actor.distribution
        if replayed is None or not distribution.is_enumerable:
            return super().learnt_from(minibatch, logits, behavior_logits)
        kl = implied_policy_kl(
            distribution.all_log_probs(logits), distribution.all_log_probs(behavior_logits)
        )
        relevant = ~(kl > self.config.replay_kl_threshold)  # a NaN must reach the loss
        metrics = {
            "relevant_share": mean(relevant.float(), replayed),
            "replay_kl": mean(kl, replayed & kl.isfinite()),
        }
        return both(minibatch.mask, ~replayed | relevant), metrics
