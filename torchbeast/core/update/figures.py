# SPDX-License-Identifier: Apache-2.0
"""Figures of minibatches: added up over slices, then over learners, and divided at the end.

An addend is a term, a share of a mean over all valid steps, or one part of a `losses.Mean`: its
total, or its number of steps, under the name with "steps of " in front.

Figures of the gradients take all parameters' gradients as one vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchbeast.core.losses import Mean

TOTAL = "total_loss"
"""The sum of the terms, which it follows; metrics follow it."""

_STEPS_OF = "steps of "


def addends(metrics: Mapping[str, Tensor | Mean], share: float) -> dict[str, Tensor]:
    """Returns what slices add up: share * metric, or total and number of steps of a Mean."""
    found: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            found |= {name: metric.total, _STEPS_OF + name: metric.steps}
        else:
            found[name] = share * metric
    return found


def divided(figures: Mapping[str, float]) -> dict[str, float]:
    """Divides each total of a Mean by its number of steps, or leaves it out where that is 0."""
    steps = {name: figures.get(_STEPS_OF + name, 1.0) for name in figures}
    return {
        name: figure / steps[name]
        for name, figure in figures.items()
        if steps[name] and not name.startswith(_STEPS_OF)
    }


def fetched(figures: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Returns the figures as floats, with a single transfer from the device."""
    tensors = {name: figure for name, figure in figures.items() if isinstance(figure, Tensor)}
    if not tensors:
        return {name: float(figure) for name, figure in figures.items()}
    values = torch.stack([tensor.detach().float() for tensor in tensors.values()]).tolist()
    return {**figures, **dict(zip(tensors, values, strict=True))}  # in their order


def means(learnt: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each figure over the minibatches, or batches, that have it."""
    values: dict[str, list[float]] = {}
    for figures in learnt:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def joined(
    learners: Sequence[Mapping[str, float]], steps: Sequence[int], terms_add_up: bool
) -> dict[str, float]:
    """Returns several learners' addends as if one learner had all their steps.

    steps: of each learner. terms_add_up: terms are sums over the steps, not means.
    """
    names = dict.fromkeys(name for figures in learners for name in figures)
    terms = [*names][: [*names].index(TOTAL) + 1] if TOTAL in names else []
    found = {}
    for name in names:
        have = [(each[name], n) for each, n in zip(learners, steps, strict=True) if name in each]
        is_part = name.startswith(_STEPS_OF) or _STEPS_OF + name in names
        if is_part or (terms_add_up and name in terms):
            found[name] = sum(value for value, _ in have)
        else:
            found[name] = _mean(have)
    return found


def _mean(values: Sequence[tuple[float, int]]) -> float:
    """Returns the mean over all steps of values that are means over so many steps each."""
    steps = sum(n for _, n in values)
    return sum(value * n for value, n in values if n) / steps if steps else 0.0


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
    return torch.linalg.vector_norm(torch.stack(norms))


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
