# SPDX-License-Identifier: Apache-2.0
"""The common base of RMSprop and Adam, which move all parameters at once.

Why not those of torch.optim: making one imports PyTorch's compiler, which takes longer than
everything else that a learner does before its first update, and none of it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Foreach(ABC):
    """An optimiser whose settings and state have the form of torch.optim's."""

    counts_steps: ClassVar[bool] = False
    """Whether the state has the number of steps of each parameter."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], averages: Iterable[str], **settings: Any
    ) -> None:
        """averages: names of the state that is kept in the shape of each parameter."""
        self._parameters: list[Tensor] = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self._parameters, **settings}]
        self._state = [self._zeros(parameter, list(averages)) for parameter in self._parameters]

    def _zeros(self, parameter: Tensor, averages: list[str]) -> dict[str, Tensor]:
        steps = {"step": torch.zeros(())} if self.counts_steps else {}
        return steps | {name: torch.zeros_like(parameter) for name in averages}

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
        found = (self._parameters[i].grad for i in moved)
        grads = [grad for grad in found if grad is not None]
        states = [self._state[i] for i in moved]
        state = {name: [own[name] for own in states] for name in states[0]}
        self._move([self._parameters[i] for i in moved], grads, state, self.param_groups[0])

    @abstractmethod
    def _move(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        state: Mapping[str, list[Tensor]],
        settings: Mapping[str, Any],
    ) -> None:
        """Moves parameters by their gradients, in place; state: theirs, by name, in place too."""

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
