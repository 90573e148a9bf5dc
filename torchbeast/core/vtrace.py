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
    """V-trace's inputs to the value loss and to the policy gradient.

    Attributes:
        vs: float32 [T, B], value targets.
        pg_advantages: float32 [T, B], advantages of the actions taken.
    """

    vs: Tensor
    pg_advantages: Tensor


class VTraceFromLogitsReturns(NamedTuple):
    """V-trace's results, and the log-probabilities that they were computed from.

    Attributes:
        vs: float32 [T, B], value targets.
        pg_advantages: float32 [T, B], advantages of the actions taken.
        log_rhos: float32 [T, B], log(pi(a) / mu(a)), not clipped.
        behavior_action_log_probs: float32 [T, B], log mu(a).
        target_action_log_probs: float32 [T, B], log pi(a).
    """

    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Returns log pi(a) [T, B] of a categorical policy.

    Args:
        policy_logits: float [T, B, num_actions].
        actions: [T, B], integers in 0, ..., num_actions - 1.
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

    Args:
        behavior_policy_logits: [T, B, num_actions], logits of mu.
        target_policy_logits: [T, B, num_actions], logits of pi.
        actions: [T, B], integers.
        discounts: [T, B], gamma, and 0 where the episode ended.
        rewards: [T, B], as in `from_importance_weights`.
        values: [T, B], V under the target policy.
        bootstrap_value: [B], V_T.
        clip_rho_threshold: rho^bar; None: no limit.
        clip_pg_rho_threshold: The limit for the policy gradient; None: no limit.

    Raises:
        ValueError: If shapes do not match.
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
    """Computes V-trace (Espeholt et al. 2018) for any pair of policies.

    Args:
        log_rhos: [T, B], log(pi(a) / mu(a)).
        discounts: [T, B], gamma, and 0 where the episode ended.
        rewards: [T, B]; where an episode was truncated, plus the discounted value of its final
            observation.
        values: [T, B], V under the target policy.
        bootstrap_value: [B], V_T.
        clip_rho_threshold: rho^bar, the limit of the weights of the value error; None: no limit.
        clip_pg_rho_threshold: The limit of the weights of the policy gradient; None: no limit.
        mask: bool [T, B]; where false, the target is V itself, the advantage is 0 and the return
            stops, whatever else the step holds. None: all true.

    Returns:
        Value targets and advantages, float32 [T, B], without a graph.

    Raises:
        ValueError: If shapes do not match.
    """
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
