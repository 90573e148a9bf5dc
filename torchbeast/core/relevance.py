# SPDX-License-Identifier: Apache-2.0
"""The relevance of replayed states: whether V-trace learns there about the policy, or another one.

From steps of a behaviour policy mu, V-trace with the limit rho_bar learns the value of neither mu
nor the target policy pi, but of the *implied policy*

    pi~_mu(a) = min(rho_bar mu(a), pi(a)) / Z,        Z = sum_b min(rho_bar mu(b), pi(b))

LASER's trust region admits a state s only where KL(pi(.|s) || pi~_mu(.|s)) is small (Schmitt,
Hessel and Simonyan 2019, arXiv 1909.11583). It chooses among states, never among actions: that
would change the distribution that the actions were drawn from.

    beta = sum_a pi(a) log(pi(a) / pi~_mu(a))
         = log Z + sum_a pi(a) relu(log pi(a) - log mu(a) - log rho_bar)

since log pi - log min(rho_bar mu, pi) is 0 where rho_bar mu is larger. The minimum does not
factorise over the choices of a joint action, so that all joint actions are needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def implied_policy_kl(
    target_log_probs: Tensor, behavior_log_probs: Tensor, rho_bar: float = 1.0
) -> Tensor:
    """Returns beta, KL(pi || pi~_mu) in nats, float32 [...], at least 0, without a graph.

    target_log_probs, behavior_log_probs: [..., A] log pi and log mu of all actions, normalised
        (see ActionDistribution.all_log_probs); -inf: the policy never does that.
    rho_bar: V-trace's limit of the importance weights, above 0.

    inf where pi does what mu never does. Raises ValueError when shapes differ.
    """
    if target_log_probs.shape != behavior_log_probs.shape:
        raise ValueError(
            f"target_log_probs has shape {list(target_log_probs.shape)}, behavior_log_probs "
            f"{list(behavior_log_probs.shape)}: both need all actions of the same states"
        )
    log_pi, limit = target_log_probs.float(), behavior_log_probs.float() + math.log(rho_bar)
    pi = log_pi.exp()
    unlearnable = (pi * (log_pi - limit).relu().masked_fill(pi == 0, 0.0)).sum(-1)
    log_z = torch.minimum(log_pi, limit).logsumexp(-1)
    # For policies without a common action, log Z is -inf and the sum inf.
    return (log_z + unlearnable).clamp(min=0.0).masked_fill(unlearnable.isposinf(), math.inf)
