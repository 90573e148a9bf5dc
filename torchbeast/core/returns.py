# SPDX-License-Identifier: Apache-2.0
"""The one recursion behind Monte Carlo returns, n-step returns, GAE and V-trace.

    delta_t = rho_t * (r_t + gamma_t * V_{t+1} - V_t)
    acc_t   = m_t * (delta_t + gamma_t * lambda * c_t * acc_{t+1})         backwards, acc_T = 0
    vs_t    = V_t + acc_t

T is time, B is batch. Entry t of every [T, B] argument belongs to step t; V_T is the bootstrap
value; m is an optional mask. With rho = c = 1, acc is the advantage of GAE, generalised advantage
estimation, and vs the lambda-return, which for lambda = 1 is the discounted return.
Espeholt et al. 2018 (arXiv 1802.01561), Schulman et al. 2016 (arXiv 1506.02438), Schmitt et al.
2019 (arXiv 1909.11583).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbeast.core.losses import masked


@torch.no_grad()
def value_targets(
    *,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    discounts: Tensor,
    rhos: Tensor | None = None,
    cs: Tensor | None = None,
    mask: Tensor | None = None,
    lambda_: float = 1.0,
) -> Tensor:
    """Returns the value targets vs [T, B] of the recursion above, in float32, without a graph.

    Trailing dimensions beyond [T, B] broadcast.

    Args:
        rewards: [T, B], r; where an episode was truncated, plus the discounted value of its final
            observation.
        values: [T, B], V.
        bootstrap_value: [B], V_T.
        discounts: [T, B], gamma, and 0 where the episode ended.
        rhos: [T, B], clipped importance weights of the value error; None: all 1.
        cs: [T, B], clipped importance weights of the trace; None: all 1.
        mask: [T, B], m, bool or 0/1. Where it is 0, the target is V and the multi-step return is
            cut: nothing else of that step counts, not even NaN. None: all 1.
        lambda_: Decay of the trace, in [0, 1].

    Raises:
        ValueError: If shapes do not match.
    """
    return values.float() + gae(
        rewards=rewards,
        values=values,
        bootstrap_value=bootstrap_value,
        discounts=discounts,
        rhos=rhos,
        cs=cs,
        mask=mask,
        lambda_=lambda_,
    )


@torch.no_grad()
def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    discounts: Tensor,
    lambda_: float,
    rhos: Tensor | None = None,
    cs: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns generalised advantage estimates, acc [T, B] of the recursion above, without a graph.

        A_t = sum over l >= 0 of (gamma lambda)^l delta_{t+l}

    For lambda = 0 it is the one-step TD error, for lambda = 1 the discounted return minus V.

    Args:
        rewards: [T, B], as in `value_targets`.
        values: [T, B], V.
        bootstrap_value: [B], V_T.
        discounts: [T, B], gamma, and 0 where the episode ended.
        lambda_: Decay of the trace, in [0, 1].
        rhos: [T, B], clipped importance weights of the value error; None: all 1.
        cs: [T, B], clipped importance weights of the trace; None: all 1.
        mask: [T, B]; where it is 0, the advantage is 0. None: all 1.

    Returns:
        float32 [T, B].

    Raises:
        ValueError: If shapes do not match.
    """
    optional = {"rhos": rhos, "cs": cs, "mask": mask}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_shapes(values, bootstrap_value, rewards=rewards, discounts=discounts, **given)
    values, discounts = values.float(), discounts.float()
    deltas = rewards.float() + discounts * next_values(values, bootstrap_value) - values
    decays = discounts * lambda_
    if rhos is not None:
        deltas = rhos.float() * deltas
    if cs is not None:
        decays = decays * cs.float()
    if mask is not None:
        deltas, decays = masked(deltas, mask.bool()), masked(decays, mask.bool())
    return _accumulate(deltas, decays)


@torch.no_grad()
def n_step_targets(
    *, rewards: Tensor, values: Tensor, discounts: Tensor, n: int, mask: Tensor | None = None
) -> Tensor:
    """Returns uncorrected n-step targets G^n [T, B], without a graph.

        G^0_t = V_t,    G^k_t = r_t + gamma_t G^(k-1)_{t+1},    G^k_T = V_T

    Fewer than n steps are left before row T, whose value then follows them.

    Args:
        rewards: [T, B], as in `value_targets`.
        values: [T+1, B], V with the bootstrap value.
        discounts: [T, B], gamma, and 0 where the episode ended.
        n: Number of steps, at least 1.
        mask: bool [T, B]; where it is false, the target is V and the returns of steps before it
            stop. None: all true.

    Raises:
        ValueError: If shapes do not match.
    """
    check_shapes(values[:-1], values[-1], rewards=rewards, discounts=discounts)
    targets = values
    for _ in range(n):
        returns = rewards + discounts * targets[1:]
        if mask is not None:
            returns = returns.where(mask, values[:-1])
        targets = torch.cat([returns, values[-1:]])
    return targets[:-1]


def next_values(values: Tensor, bootstrap_value: Tensor) -> Tensor:
    """Returns V_{t+1} [T, B].

    Args:
        values: [T, B], V_t.
        bootstrap_value: [B], V_T, which comes last.
    """
    return torch.cat([values[1:], bootstrap_value.float().unsqueeze(0)])


def _accumulate(deltas: Tensor, decays: Tensor) -> Tensor:
    """Returns acc [T, B] with acc_t = delta_t + decay_t * acc_{t+1} and acc_T = 0."""
    steps = list(zip(deltas.unbind(), decays.unbind(), strict=True))
    acc = torch.zeros_like(deltas[0])
    accs = []
    for delta, decay in reversed(steps):
        acc = torch.addcmul(delta, decay, acc)
        accs.append(acc)
    return torch.stack(accs[::-1])


def check_shapes(values: Tensor, bootstrap_value: Tensor, **others: Tensor) -> None:
    """Raises ValueError for shapes that do not match.

    Args:
        values: [T, B, ...] with T > 0.
        bootstrap_value: [B, ...].
        **others: [T, B, ...], with as many dimensions as values; dimensions beyond time and batch
            may be 1.
    """
    if values.dim() == 0 or not len(values):
        raise ValueError(f"values needs at least one step, got shape {list(values.shape)}")
    if bootstrap_value.shape != values.shape[1:]:
        raise ValueError(
            f"bootstrap_value has shape {list(bootstrap_value.shape)} but values has shape "
            f"{list(values.shape)}: expected {list(values.shape[1:])}"
        )
    for name, tensor in others.items():
        if tensor.dim() != values.dim() or not _matches(tensor.shape, values.shape):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} but values has shape {list(values.shape)}: "
                "time and batch must be equal, further dimensions equal or 1"
            )


def _matches(shape: torch.Size, other: torch.Size) -> bool:
    trailing = zip(shape[2:], other[2:], strict=True)
    return shape[:2] == other[:2] and all(a == b or 1 in (a, b) for a, b in trailing)
