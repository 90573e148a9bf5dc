# SPDX-License-Identifier: Apache-2.0
"""RMSprop as PyTorch computes it, all parameters at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.algos.foreach import Foreach


class RMSprop(Foreach):
    """square_avg <- alpha square_avg + (1 - alpha) g^2;  step = g / (sqrt(square_avg) + eps).

    The square average starts at 0 and eps is outside the root, as in torch.optim.RMSprop, whose
    state_dict loads here. With momentum m the step is summed into a buffer that decays by m.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
    ) -> None:
        averages = ["square_avg", "momentum_buffer"] if momentum else ["square_avg"]
        super().__init__(parameters, averages, lr=lr, alpha=alpha, eps=eps, momentum=momentum)

    def _move(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        state: Mapping[str, list[Tensor]],
        settings: Mapping[str, Any],
    ) -> None:
        square_avgs = state["square_avg"]
        torch._foreach_mul_(square_avgs, settings["alpha"])
        torch._foreach_addcmul_(square_avgs, grads, grads, value=1 - settings["alpha"])
        roots = torch._foreach_sqrt(square_avgs)
        torch._foreach_add_(roots, settings["eps"])
        if settings["momentum"]:
            buffers = state["momentum_buffer"]
            torch._foreach_mul_(buffers, settings["momentum"])
            torch._foreach_addcdiv_(buffers, grads, roots)
            torch._foreach_add_(parameters, buffers, alpha=-settings["lr"])
        else:
            torch._foreach_addcdiv_(parameters, grads, roots, value=-settings["lr"])
