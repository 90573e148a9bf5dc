# SPDX-License-Identifier: Apache-2.0
"""RMSprop as PyTorch computes it, all parameters at once.

Why not torch.optim.RMSprop: making one imports PyTorch's compiler, which takes longer than
everything else that a learner does before its first update, and none of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class RMSprop:
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
        self._parameters: list[Tensor] = list(parameters)
        self.param_groups: list[dict[str, Any]] = [
            {"params": self._parameters, "lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum}
        ]
        names = ["square_avg", "momentum_buffer"] if momentum else ["square_avg"]
        self._state: list[dict[str, Tensor]] = [
            {name: torch.zeros_like(parameter) for name in names} for parameter in self._parameters
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or makes them zero."""
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        moved = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if not moved:
            return
        group = self.param_groups[0]
        parameters, grads = [self._parameters[i] for i in moved], self._grads(moved)
        square_avgs = [self._state[i]["square_avg"] for i in moved]
        torch._foreach_mul_(square_avgs, group["alpha"])
        torch._foreach_addcmul_(square_avgs, grads, grads, value=1 - group["alpha"])
        roots = torch._foreach_sqrt(square_avgs)
        torch._foreach_add_(roots, group["eps"])
        if group["momentum"]:
            buffers = [self._state[i]["momentum_buffer"] for i in moved]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_addcdiv_(buffers, grads, roots)
            torch._foreach_add_(parameters, buffers, alpha=-group["lr"])
        else:
            torch._foreach_addcdiv_(parameters, grads, roots, value=-group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by the parameter's number, and the settings, as torch.optim does."""
        numbers = list(range(len(self._parameters)))
        group = {**self.param_groups[0], "params": numbers}
        return {"state": dict(zip(numbers, self._state, strict=True)), "param_groups": [group]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the averages. The settings stay those that this optimiser was made with; what
        the state lacks, such as a momentum that was not used, starts at 0.
        """
        for number, mine in enumerate(self._state):
            saved = state_dict["state"].get(number, {})
            for name, tensor in mine.items():
                tensor.copy_(saved[name]) if name in saved else tensor.zero_()

    def _grads(self, moved: list[int]) -> list[Tensor]:
        found = (self._parameters[i].grad for i in moved)
        return [grad for grad in found if grad is not None]
