# SPDX-License-Identifier: Apache-2.0
"""V-trace: off-policy value targets for a policy pi from steps of a behaviour policy mu.

    vs_t = V_t + sum_{s >= t} gamma^(s-t) (prod_{i=t}^{s-1} c_i) rho_s (r_s + gamma V_{s+1} - V_s)
    rho_t = min(rho_bar, pi(a_t) / mu(a_t)),   c_t = min(1, pi(a_t) / mu(a_t))

Espeholt et al. 2018, "IMPALA" (arXiv 1802.01561), equation 1. T is time, B is batch; entry t of
every [T, B] argument belongs to step t. Only the ratio of the two policies matters, so
log-probabilities of any distribution can be used. Everything is computed in float32 and without a
gradient graph, whatever the precision of the networks.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchbeast.core import returns
from torchbeast.core.losses import masked

# An upper limit of the importance weights; None leaves them unclipped.
Threshold: TypeAlias = float | Tensor | None


class VTraceReturns(NamedTuple):
    """V-trace's inputs to the value loss and to the policy gradient."""

    vs: Tensor  # [T, B] value targets
    pg_advantages: Tensor  # [T, B] advantages of the actions taken


class VTraceFromLogitsReturns(NamedTuple):
    """V-trace's results and the log-probabilities they were computed from."""

    vs: Tensor  # [T, B]
    pg_advantages: Tensor  # [T, B]
    log_rhos: Tensor  # [T, B] log(pi(a) / mu(a)), not clipped
    behavior_action_log_probs: Tensor  # [T, B] log mu(a)
    target_action_log_probs: Tensor  # [T, B] log pi(a)


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Returns log pi(a) [T, B] of a categorical policy.

    policy_logits: [T, B, num_actions] float.
    actions: [T, B] integers in 0, ..., num_actions - 1.
    """
    log_probs = torch.log_softmax(policy_logits, dim=-1)
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: Threshold = 1.0,
    clip_pg_rho_threshold: Threshold = 1.0,
) -> VTraceFromLogitsReturns:
    """Computes V-trace for categorical policies; see `from_importance_weights`.

    behavior_policy_logits, target_policy_logits: [T, B, num_actions] logits of mu and of pi.
    actions: [T, B] integers.
    The other arguments, results and errors are those of `from_importance_weights`.
    """
    target_log_probs = action_log_probs(target_policy_logits.float(), actions)
    behavior_log_probs = action_log_probs(behavior_policy_logits.float(), actions)
    log_rhos = target_log_probs - behavior_log_probs
    vs, pg_advantages = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold,
        clip_pg_rho_threshold,
    )
    return VTraceFromLogitsReturns(
        vs, pg_advantages, log_rhos, behavior_log_probs, target_log_probs
    )


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: Threshold = 1.0,
    clip_pg_rho_threshold: Threshold = 1.0,
    mask: Tensor | None = None,
) -> VTraceReturns:
    """Computes V-trace for any pair of policies.

    log_rhos: [T, B] log(pi(a) / mu(a)).
    discounts: [T, B] gamma, and 0 where the episode ended.
    rewards: [T, B]; where an episode was truncated, plus the discounted value of its final
        observation.
    values: [T, B] V under the target policy.
    bootstrap_value: [B] V_T.
    clip_rho_threshold: rho^bar, the limit of the weights of the value error; None: no limit.
    clip_pg_rho_threshold: the limit of the weights of the policy gradient; None: no limit.
    mask: [T, B] bool; where false the target is V itself, the advantage is 0 and the return stops,
        whatever else the step holds; None: all true.

    Returns targets and advantages [T, B]. Raises ValueError when shapes do not match.
    """
    returns.check_shapes(
        values, bootstrap_value, log_rhos=log_rhos, discounts=discounts, rewards=rewards
    )
    ratios = log_rhos.float().exp()
    rewards, discounts, values = rewards.float(), discounts.float(), values.float()
    vs = returns.value_targets(
        rewards=rewards,
        values=values,
        bootstrap_value=bootstrap_value,
        discounts=discounts,
        rhos=_clip(ratios, clip_rho_threshold),
        cs=_clip(ratios, 1.0),
        mask=mask,
    )
    td_errors = rewards + discounts * returns.next_values(vs, bootstrap_value) - values
    advantages = _clip(ratios, clip_pg_rho_threshold) * td_errors
    return VTraceReturns(vs, masked(advantages, mask))


def _clip(ratios: Tensor, threshold: Threshold) -> Tensor:
    return ratios if threshold is None else ratios.clamp(max=float(threshold))
