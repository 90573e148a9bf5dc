# SPDX-License-Identifier: Apache-2.0
"""The KL to the implied policy, by its definition: probabilities, float64, action by action."""

from __future__ import annotations

import math

from torch import Tensor


def probabilities(logits: Tensor) -> list[float]:
    """The softmax of logits [A]."""
    weights = [math.exp(logit) for logit in logits.double().tolist()]
    return [weight / sum(weights) for weight in weights]


def by_definition(pi: list[float], mu: list[float], rho_bar: float = 1.0) -> float:
    """KL(pi || pi~), from the implied policy pi~ itself."""
    weights = [min(rho_bar * m, p) for p, m in zip(pi, mu, strict=True)]
    if not sum(weights):
        return math.inf
    implied = [weight / sum(weights) for weight in weights]
    pairs = [(p, q) for p, q in zip(pi, implied, strict=True) if p]
    return sum(p * math.log(p / q) if q else math.inf for p, q in pairs)
