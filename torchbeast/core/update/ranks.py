# SPDX-License-Identifier: Apache-2.0
"""Learners that take every optimiser step together, each from its own minibatch.

    rank 0: gradients, metrics --+                       +--> the same step
    rank 1: gradients, metrics --+-- gather, sum --> all +--> the same step

Their weights stay bit-equal without being sent, because all compute the same step from the same
numbers: a loss that is not finite, or an algorithm that leaves out the rest of its minibatches, is
so for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.core.actors.running_norm import Moments, RunningNorm
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.losses import Reduction
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.minibatch import STEPS_OF, TOTAL, MinibatchReport, fetched


class Ranks(Protocol):
    """The learners of a run, each of which calls these methods in the same order.

    Both raise RunError when another learner has ended, with its reason if it gave one.
    """

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages of all learners, which are JSON, in the order of ranks."""

    def add(self, vector: Tensor) -> Tensor:
        """Returns the sum of the learners' vectors [n], added in the order of ranks."""


class Contribution(NamedTuple):
    """One learner's share of an optimiser step."""

    message: dict[str, Any]  # JSON of a MinibatchReport, and of the parameters that have a gradient
    gradients: Any  # [n] of the parameters that are not frozen; of means times the steps


class JointGradients:
    """Joins the gradients of all parameters of an algorithm.

    Gradients of a "sum" are added up. Those of a "mean" are weighted by the number of steps, so
    that the result is the mean over all valid steps of all learners. Frozen parameters are left
    out; `check_same_step` checks that all learners freeze the same ones.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reduction: Reduction) -> None:
        self._parameters = list(parameters)
        self._is_mean = reduction == "mean"
        is_double = any(p.dtype == torch.float64 for p in parameters)
        self._dtype = torch.float64 if is_double else torch.float32

    def packed(self, report: MinibatchReport) -> Contribution:
        """Returns the present gradients with the rest of the report."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        pieces = [self._gradient(parameter, report.steps) for parameter in trained]
        message = {
            "metrics": fetched(report.metrics),
            "steps": report.steps,
            "env_steps": report.env_steps,
            "minibatch": report.minibatch,
            "trained": [int(p.requires_grad) for p in self._parameters],
            "has_gradient": [int(p.grad is not None) for p in trained],
        }
        return Contribution(message, torch.cat(pieces))

    def unpacked(self, messages: Sequence[Mapping[str, Any]], total: Tensor) -> MinibatchReport:
        """Sets the gradients to all learners' together; returns what they found together.

        messages: checked by `check_same_step`. total: the sum of their vectors, on any device.
        """
        steps = sum(message["steps"] for message in messages)
        total = total.to(self._parameters[0].device)  # in one transfer
        if self._is_mean:
            total = total / max(1, steps)
        for parameter in self._parameters:
            parameter.grad = None
        both = zip(self._parameters, messages[0]["trained"], strict=True)
        trained = [parameter for parameter, is_trained in both if is_trained]
        pieces = torch.split(total, [parameter.numel() for parameter in trained])
        have = [any(has) for has in zip(*(m["has_gradient"] for m in messages), strict=True)]
        for parameter, piece, has in zip(trained, pieces, have, strict=True):
            if has and parameter.requires_grad:  # it may have been frozen meanwhile
                parameter.grad = piece.view_as(parameter).to(parameter)
        metrics = _joined_metrics(messages, terms_add_up=not self._is_mean)
        env_steps = sum(message["env_steps"] for message in messages)
        return MinibatchReport(metrics, steps, env_steps, messages[0]["minibatch"])

    def _gradient(self, parameter: nn.Parameter, steps: int) -> Tensor:
        """Returns a parameter's gradient as a vector of our dtype."""
        if parameter.grad is None or (self._is_mean and not steps):
            return torch.zeros(parameter.numel(), dtype=self._dtype, device=parameter.device)
        gradient = parameter.grad.reshape(-1).to(self._dtype)
        return gradient * steps if self._is_mean else gradient


def _joined_metrics(messages: Sequence[Mapping[str, Any]], terms_add_up: bool) -> dict[str, float]:
    """Returns several learners' addends as if one learner had all their steps.

    terms_add_up: terms are sums over the steps, not means.
    """
    names = list(dict.fromkeys(name for message in messages for name in message["metrics"]))
    terms = names[: names.index(TOTAL) + 1]
    joined = {}
    for name in names:
        having = [message for message in messages if name in message["metrics"]]
        values = [(message["metrics"][name], message["steps"]) for message in having]
        is_part = name.startswith(STEPS_OF) or STEPS_OF + name in names
        if is_part or (terms_add_up and name in terms):
            joined[name] = sum(value for value, _ in values)
        else:  # the mean over all steps of values that are means over n steps each
            total = sum(value * n for value, n in values if n)
            joined[name] = total / max(1, sum(n for _, n in values))
    return joined


def added_in_order(vectors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of vectors, added one after the other: the same bits wherever it is done."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def check_same_place(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the learners are at different minibatches of their batches.

    A message without one says what the learner observed, before the first.
    """
    numbers = [message.get("minibatch", "before the first") for message in messages]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the learners are at different minibatches of their batches, {numbers}: minibatches() "
            "must yield the same number in each of them"
        )


def check_same_step(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the gradients of the learners cannot be added up.

    They are of different minibatches, or of different parameters.
    """
    check_same_place(messages)
    trained = [message["trained"] for message in messages]
    different = [n for n, flags in enumerate(zip(*trained, strict=True)) if len(set(flags)) > 1]
    if different:
        raise ValueError(
            "the learners freeze different parameters: requires_grad of the optimisers' parameters "
            f"number {different} (counted from 0) differs between learners: freeze the same layers "
            "in each of them"
        )


@contextmanager
def keeping_buffers(
    algo: Algorithm[Any], method: str, but: Sequence[RunningNorm] = ()
) -> Iterator[None]:
    """Raises NotImplementedError if a method of one of several learners, the body, writes to the
    models' buffers, apart from the buffers of some RunningNorms.

    The learners have different batches, so their buffers would differ, or the weights of the
    process that applies the gradients would replace them. Buffers that are not in the state_dict,
    such as tables of positions that grow, are each learner's own: they are never sent or saved.
    """
    others = {id(buffer) for norm in but for buffer in norm.buffers()}
    models = nn.ModuleDict(algo.models)
    before = {n: (b, _version(b)) for n, b in models.named_buffers() if id(b) not in others}
    yield
    now = dict(models.named_buffers())
    for name, (buffer, version) in before.items():
        is_same = now.get(name) is buffer and _version(buffer) == version
        if not is_same and name in models.state_dict():
            raise NotImplementedError(
                f"{type(algo).__name__}.{method} changes the buffer {name}, but several learners "
                "must keep the same buffers, and each sees only its own batch: set the buffer in "
                "`schedule` from the counters, or in `after_step` from the weights, keep "
                "statistics in a RunningNorm that `observe` adds to, or use one learner"
            )


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version  # an inference tensor has none


class Statistics:
    """The running statistics of an algorithm's models, which count all learners' batches."""

    def __init__(self, algo: Algorithm[Any]) -> None:
        self._algo = algo
        modules = nn.ModuleList(algo.models.values()).modules()  # once each: models may share one
        self._norms = [module for module in modules if isinstance(module, RunningNorm)]

    def observed(self, batch: Batch) -> list[Moments]:
        """Adds a batch, and returns what it adds to each RunningNorm.

        Raises NotImplementedError if there are statistics elsewhere: nothing says how several
        learners would join them.
        """
        before = [norm.moments() for norm in self._norms]
        with torch.no_grad(), keeping_buffers(self._algo, "observe", self._norms):
            self._algo.observe(batch)
        return [norm.moments().without(was) for norm, was in zip(self._norms, before, strict=True)]

    def add(self, observed: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Adds what several learners have `observed`, in their order.

        observed: for each learner and RunningNorm its Moments, as arrays or lists.
        """
        for norm, *parts in zip(self._norms, *observed, strict=True):
            seen = [moments for part in parts if (moments := _like(norm, part)).rows]
            norm.set_moments(functools.reduce(Moments.merged, seen, norm.moments()))

    def join(self, batch: Batch, ranks: Ranks) -> None:
        """Adds all learners' batches; batch: this one's."""
        before = [norm.moments() for norm in self._norms]
        own = self.observed(batch)
        if not self._norms:
            return
        texts = [[part.tolist() for part in moments] for moments in own]
        messages = ranks.gather({"observed": texts})
        check_same_place(messages)
        for norm, moments in zip(self._norms, before, strict=True):
            norm.set_moments(moments)
        self.add([message["observed"] for message in messages])


def _like(norm: RunningNorm, moments: Sequence[Any]) -> Moments:
    """Returns moments with the dtypes of the norm's, on its device."""
    both = zip(map(np.asarray, moments), norm.moments(), strict=True)
    return Moments(*(torch.tensor(part, dtype=own.dtype, device=own.device) for part, own in both))
