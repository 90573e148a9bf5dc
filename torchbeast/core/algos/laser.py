# SPDX-License-Identifier: Apache-2.0
"""LASER: IMPALA that also learns from replay (Schmitt, Hessel, Simonyan 2019, arXiv 1909.11583).

A replayed state is learnt from where it is relevant: where the implied policy, which V-trace
evaluates in place of the policy, is close to it (see torchbeast/core/relevance.py). An irrelevant
one has no gradient, and the returns of the states before it stop there and bootstrap from its
value. Online states are learnt from as in IMPALA.
"""

from __future__ import annotations

import math

from torch import Tensor

from torchbeast.core.actors.contract import Actor
from torchbeast.core.algos.config import LaserConfig
from torchbeast.core.algos.impala import Impala
from torchbeast.core.losses import Mean, both, mean
from torchbeast.core.relevance import implied_policy_kl
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError


class Laser(Impala):
    """Learns from rollouts of recent and of replayed policies."""

    Config = LaserConfig
    learns_from_replay = True
    config: LaserConfig

    @classmethod
    def check_actor(cls, actor: Actor, config: LaserConfig) -> None:
        """Adds a UsageError where the trust region cannot be computed."""
        super().check_actor(actor, config)
        if math.isinf(config.replay_kl_threshold):
            return
        try:
            actor.distribution.check_enumerable()
        except NotImplementedError as error:
            raise UsageError(
                f"{cls.__name__} needs the probabilities of all actions to tell which replayed "
                f"states are relevant, but {error}: use --replay_kl_threshold inf to learn from "
                "all states, or another --algo"
            ) from error

    def learnt_from(
        self, minibatch: Rollout, logits: Tensor, behavior_logits: Tensor
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        """Chooses the online states and the relevant replayed ones. Metrics: the share of replayed
        states that are relevant, and the mean KL(policy || implied policy) where it is finite.
        """
        replayed, distribution = minibatch.replayed_mask, self.actor.distribution
        if replayed is None or not distribution.is_enumerable:
            return super().learnt_from(minibatch, logits, behavior_logits)
        kl = implied_policy_kl(
            distribution.all_log_probs(logits), distribution.all_log_probs(behavior_logits)
        )
        relevant = ~(kl > self.config.replay_kl_threshold)  # a NaN is learnt from, and so noticed
        metrics = {
            "relevant_share": mean(relevant.float(), replayed),
            "replay_kl": mean(kl, replayed & kl.isfinite()),
        }
        return both(minibatch.mask, ~replayed | relevant), metrics
