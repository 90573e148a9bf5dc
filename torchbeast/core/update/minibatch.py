# SPDX-License-Identifier: Apache-2.0
"""The gradients and metrics of a minibatch, from slices of its columns, in several threads.

    batch [T+1, B] -- split --> [T+1, b] [T+1, b] ... --> whichever thread is free --> .grad, summed

Losses add up over columns, so the gradients of the slices add up to the whole batch's, and
nothing is computed twice. The activations of a slice stay in the cache of the core that computes
them. Threads synchronise once per batch; threads inside operations synchronise after every
operation, which is expensive where other processes compete for the cores.

Figures are added up over slices, then over learners, and divided at the end. An addend is a term, a
share of a mean over all valid steps, or one part of a `losses.Mean`: its total, or its number of
steps, under the name with "steps of " in front. Figures of the gradients take all parameters'
gradients as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.base.nest import Nest, flatten, pack_as
from torchbeast.core.losses import Mean
from torchbeast.core.storages.batch import NO_FEEDBACK, Batch, Feedback

# About the size of a row's activations. Measured with an LSTM of 17 MB: slices of 4 columns take
# 1.2 to 1.4 times as long as all 32 at once, slices of 8 the same time.
_RECURRENT_BYTES_A_COLUMN = 2_000_000
# Observations of 42 Atari rows. With the shallow network half of them take 0.75 times as long.
WORTH_A_THREAD = 42 * 4 * 84 * 84

TOTAL = "total_loss"
"""The sum of the terms, which it follows; metrics follow it."""

STEPS_OF = "steps of "

_Learnt = tuple[dict[str, Tensor], Feedback]
Learn = Callable[[Any], _Learnt]  # learns from a slice: adds its gradients to the parameters


@dataclass(frozen=True)
class MinibatchReport:
    """A learner's findings in a minibatch, apart from the gradients.

    metrics: addends. steps: learnt from. env_steps: newly collected, counted with the first
    minibatch of a batch. minibatch: its number in the batch. feedback: for the replay, which only
    a single learner can have.
    """

    metrics: Mapping[str, Any]  # scalar tensors, or floats
    steps: int
    env_steps: int
    minibatch: int
    feedback: Feedback = NO_FEEDBACK


class Slices:
    """Splits a model's batches into slices and learns from them in several threads.

    Used by one thread at a time, which does its share. With several threads gradients are added in
    no fixed order, so the last digits vary.
    """

    def __init__(self, model: nn.Module, bytes_at_once: int | None, num_threads: int) -> None:
        """Prepares the threads, which end once this object is gone.

        bytes_at_once: bytes of observations in a slice; None: the whole batch is one slice.
        """
        self._model = model
        self._bytes_at_once = bytes_at_once
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "slices")

    def split(self, batch: Batch) -> Sequence[Batch]:
        """Returns slices that fit the cache, or smaller ones to occupy more threads."""
        size = batch.batch_size, batch.column_bytes
        return batch.split(
            columns_of_a_slice(self._model, size, self._bytes_at_once, self._num_threads)
        )

    def backward(self, batch: Batch, learn: Learn) -> _Learnt:
        """Adds the gradients of all slices to the parameters; returns sums of the metrics, and the
        feedback of all columns.

        An error in any thread is raised after all have ended.
        """
        slices = self.split(batch)
        left = iter(enumerate(slices))  # gives each slice to one thread
        learnt: dict[int, _Learnt] = {}
        threads = torch.get_num_threads()

        def share() -> None:
            for number, columns in left:  # autograd locks gradients that threads share
                learnt[number] = learn(columns)

        def help_out() -> None:
            torch.set_num_threads(threads)  # as in the thread that waits for the result
            share()

        count = min(self._num_threads, len(slices)) - 1
        helped = [self._helpers.submit(help_out) for _ in range(count)]
        try:
            share()
        finally:
            wait(helped)
        for helper in helped:
            helper.result()
        if len(slices) == 1:
            return learnt[0]
        metrics, feedback = zip(*(learnt[number] for number in range(len(slices))), strict=True)
        names = dict.fromkeys(name for of_slice in metrics for name in of_slice)
        sums = {n: torch.stack([found[n] for found in metrics if n in found]).sum() for n in names}
        return sums, joined_feedback(feedback, batch.batch_size)


def joined_feedback(parts: Sequence[Feedback], columns: int) -> Feedback:
    """Returns the feedback of a batch: the newest of each column. Every column needs some, so the
    minibatches of a batch that needs feedback are all of its columns, in order.

    Args:
        parts: The feedback of its columns, in order, once or several times.
        columns: The number of columns.
    """
    if len(parts) == 1:
        return parts[0]
    priorities = [part.priorities for part in parts if part.priorities is not None]
    states = [part.final_state for part in parts if part.final_state is not None]
    state: Nest[Tensor] | None = None
    if states:
        leaves = zip(*map(flatten, states), strict=True)
        state = pack_as(states[0], [_newest(leaf, 1, columns) for leaf in leaves])
    return Feedback(_newest(priorities, 0, columns) if priorities else None, state)


def _newest(parts: Sequence[Tensor], dim: int, columns: int) -> Tensor:
    whole = torch.cat([*parts], dim)
    size = whole.shape[dim]
    return whole.narrow(dim, size - columns, columns).roll(size % columns, dim)


def columns_of_a_slice(
    model: nn.Module, size: tuple[int, int], bytes_at_once: int | None, num_threads: int
) -> int:
    """Returns the most columns in a slice; size: columns of the batch, and bytes of each.

    A small batch is divided even where a recurrent layer then gets only half the columns that it
    should: threads inside operations spin while actors have their cores, which costs more.
    """
    columns, column_bytes = size[0], max(1, size[1])
    if bytes_at_once is None:
        return columns
    a_share = -(-columns // num_threads)
    wanted = min(bytes_at_once // column_bytes, max(a_share, WORTH_A_THREAD // column_bytes))
    if wanted >= columns:
        return columns
    least = least_columns(model)
    return max(wanted, min(least, a_share), least // 2)


def least_columns(model: nn.Module) -> int:
    """Returns the number of columns in the smallest efficient slice.

    A recurrent layer reads its weights again for every row, so large ones need many columns.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    weights: int = sum(p.nbytes for layer in layers for p in layer.parameters())
    return 1 + weights // _RECURRENT_BYTES_A_COLUMN


def addends(metrics: Mapping[str, Tensor | Mean], share: float) -> dict[str, Tensor]:
    """Returns what slices add up: share * metric, or total and number of steps of a Mean."""
    summands: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            summands |= {name: metric.total, STEPS_OF + name: metric.steps}
        else:
            summands[name] = share * metric
    return summands


def divided(metrics: Mapping[str, float]) -> dict[str, float]:
    """Divides each total of a Mean by its number of steps, or leaves it out where that is 0."""
    steps = {name: metrics.get(STEPS_OF + name, 1.0) for name in metrics}
    return {
        name: metric / steps[name]
        for name, metric in metrics.items()
        if steps[name] and not name.startswith(STEPS_OF)
    }


def fetched(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Returns the metrics as floats, with a single transfer from the device."""
    tensors = {name: metric for name, metric in metrics.items() if isinstance(metric, Tensor)}
    if not tensors:
        return {name: float(metric) for name, metric in metrics.items()}
    values = torch.stack([tensor.detach().float() for tensor in tensors.values()]).tolist()
    return {**metrics, **dict(zip(tensors, values, strict=True))}  # in their order


def means(learnt: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the minibatches, or batches, that have it."""
    values: dict[str, list[float]] = {}
    for metrics in learnt:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(of_metric) / len(of_metric) for name, of_metric in values.items()}


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns the 2-norm of all gradients as one vector, 0 without gradients.

    It is a scalar tensor on the device, which nothing has waited for.
    """
    gradients = gradients_of(parameters)
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, maximum: float) -> None:
    """Scales gradients of the given norm in place, so that their norm is at most `maximum`."""
    if norm > maximum:
        torch._foreach_mul_(gradients_of(parameters), maximum / norm)


def first_non_finite_gradient(named: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Returns the name of the first parameter whose gradient has a NaN or an infinity."""
    for name, parameter in named:
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return name
    return "all parameters together (its norm overflows)"
