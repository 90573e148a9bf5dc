# SPDX-License-Identifier: Apache-2.0
"""RMSprop and Adam as PyTorch computes them, all parameters at once.

Adam is PyTorch's fused kernel: for two layers of 128 it takes a quarter of the time of one
operation after the other, for two of 1,000 a third.

They take the place of torch.optim's, because making one of those imports PyTorch's compiler, which
takes longer than everything else that a learner does before its first update and is never used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Tensors = list[Tensor]


class Foreach(ABC):
    """An optimiser whose settings and state have the form of torch.optim's."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], averages: Sequence[str], **settings: Any
    ) -> None:
        """averages: names of the state that is kept in the shape of each parameter; "step": the
        number of its steps.
        """
        self._parameters: Tensors = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self._parameters, **settings}]
        self._averages = averages

    @cached_property
    def _state(self) -> list[dict[str, Tensor]]:
        """The state of each parameter, made when it is first needed: a parameter may move to
        another device before that.
        """
        return [
            {
                n: p.new_zeros((), dtype=torch.float32) if n == "step" else torch.zeros_like(p)
                for n in self._averages
            }
            for p in self._parameters
        ]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        both = zip(self._parameters, self._state, strict=True)
        trained = [(p, p.grad, state) for p, state in both if p.grad is not None]
        if not trained:
            return
        parameters, grads, states = zip(*trained, strict=True)
        state = {name: [own[name] for own in states] for name in states[0]}
        self._move([*parameters], [*grads], state)

    @abstractmethod
    def _move(self, parameters: Tensors, grads: Tensors, state: Mapping[str, Tensors]) -> None:
        """Moves parameters by their gradients, in place; state: theirs, by name, in place too."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by the parameter's number, and the settings, as torch.optim does."""
        numbers = list(range(len(self._parameters)))
        group = {**self.param_groups[0], "params": numbers}
        return {"state": dict(zip(numbers, self._state, strict=True)), "param_groups": [group]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the averages. The settings stay as this optimiser was made; what the state
        lacks, such as a momentum that was not used, starts at 0.
        """
        for number, mine in enumerate(self._state):
            saved = state_dict["state"].get(number, {})
            for name, tensor in mine.items():
                tensor.copy_(saved[name]) if name in saved else tensor.zero_()


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

    def _move(self, parameters: Tensors, grads: Tensors, state: Mapping[str, Tensors]) -> None:
        settings, square_avgs = self.param_groups[0], state["square_avg"]
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


class Adam(Foreach):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2, both starting at 0.

        step = m / (1 - beta1^k) / (sqrt(v / (1 - beta2^k)) + eps)     in the k-th step

    With a weight decay d it is AdamW: parameters are first multiplied by 1 - lr * d (arXiv
    1412.6980, 1711.05101). The state_dict of torch.optim.Adam and AdamW loads here.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        averages = ["step", "exp_avg", "exp_avg_sq"]
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, averages, **settings)

    def _move(self, parameters: Tensors, grads: Tensors, state: Mapping[str, Tensors]) -> None:
        settings, steps = self.param_groups[0], state["step"]
        beta1, beta2 = settings["betas"]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(  # with a weight decay of 0 it is Adam
            parameters,
            [_laid_out_as(p, g) for p, g in zip(parameters, grads, strict=True)],
            state["exp_avg"],
            state["exp_avg_sq"],
            [],
            steps,
            lr=settings["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=False,
            maximize=False,
        )


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient with the strides of its parameter, which the fused kernel relies on
    without a check. Those of other processes are contiguous, weights of convolutions may not be.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
