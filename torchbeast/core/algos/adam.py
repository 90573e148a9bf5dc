# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW as PyTorch computes them, all parameters at once (arXiv 1412.6980, 1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.algos.foreach import Foreach


class Adam(Foreach):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2, both starting at 0.

        step = m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + eps)     in the k-th step

    With a weight decay d it is AdamW: parameters are first multiplied by 1 - lr * d. The state_dict
    of torch.optim.Adam and AdamW loads here.
    """

    counts_steps = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        averages = ["exp_avg", "exp_avg_sq"]
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, averages, **settings)

    def _move(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        state: Mapping[str, list[Tensor]],
        settings: Mapping[str, Any],
    ) -> None:
        beta1, beta2 = settings["betas"]
        steps, m, v = state["step"], state["exp_avg"], state["exp_avg_sq"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - beta2)
        counts = [step.item() for step in steps]
        roots = torch._foreach_sqrt(v)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**k) for k in counts])
        torch._foreach_add_(roots, settings["eps"])
        if settings["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - settings["lr"] * settings["weight_decay"])
        rates = [-settings["lr"] / (1 - beta1**k) for k in counts]
        torch._foreach_addcdiv_(parameters, m, roots, rates)
