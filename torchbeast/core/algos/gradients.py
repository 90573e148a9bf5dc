# SPDX-License-Identifier: Apache-2.0
"""Functions of the gradients of many parameters, taken as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns the 2-norm of all gradients as one vector, 0 without gradients.

    It is a scalar tensor on the device, which nothing has waited for.
    """
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients_of(parameters)]
    if not norms:
        return torch.zeros((), device=parameters[0].device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, maximum: float) -> None:
    """Scales gradients of the given norm in place, so that their norm is at most `maximum`."""
    if norm > maximum:
        for gradient in gradients_of(parameters):
            gradient.mul_(maximum / norm)


def first_non_finite(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Returns the name of the first parameter whose gradient has a NaN or an infinity."""
    for name, parameter in named:
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return "all parameters together (its norm overflows)"
