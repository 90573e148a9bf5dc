# SPDX-License-Identifier: Apache-2.0
"""The update that all algorithms share: from a batch to new weights.

batch -> statistics -> prepare, metrics -> for each minibatch, until stops_after:
    gradients of its slices -> joined over ranks -> checked -> clipped -> step -> after_step
-> a new version of the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn

from torchbeast.core.algos import saving
from torchbeast.core.algos.base import Algorithm, BatchT, Optimizer
from torchbeast.core.algos.checks import checked_losses, checked_metrics
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.counters import Counters
from torchbeast.core.algos.gradients import (
    clip_gradients,
    first_non_finite,
    gradient_norm,
    gradients_of,
)
from torchbeast.core.algos.schedule import LinearDecay
from torchbeast.core.algos.slices import Slices
from torchbeast.core.checks import above
from torchbeast.core.losses import Mean, Reduction
from torchbeast.core.nest_py import flatten

_TOTAL = "total_loss"
_STEPS_OF = "steps of "  # before a metric's name: their number


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights are as before the optimiser step."""


JoinRanks = Callable[[list[Tensor], Reduction], None]
"""Replaces gradients in place by their sum over all learners, or by their mean for "mean"."""


def only_rank(gradients: list[Tensor], reduction: Reduction) -> None:
    """Leaves the gradients of the only learner as they are."""


def is_separable(algo: Algorithm[Any]) -> bool:
    """Returns whether algorithm and actor both allow learning from slices of a batch."""
    return algo.separable and algo.actor.separable


class OptimiserStep(Generic[BatchT]):
    """Updates an algorithm's models in place. Used by one thread at a time."""

    def __init__(
        self,
        algo: Algorithm[BatchT],
        config: StepConfig,
        *,
        total_steps: int,
        bytes_at_once: int | None = None,
        num_threads: int = 1,
        join_ranks: JoinRanks = only_rank,
    ) -> None:
        """Prepares updates; raises ValueError when the algorithm's optimisers are incomplete.

        total_steps: env steps after which learning rates are 0.
        bytes_at_once: bytes of observations in a slice of a batch; None: the whole batch.
        num_threads: threads that learn from slices. Like the size of slices it changes speed and
            the last digits of results only; a batch that is not separable is learnt in one slice.
        """
        above(0, total_steps=total_steps)
        self.algo = algo
        self.counters = Counters()
        self._config = config
        self._join_ranks = join_ranks
        self._minimisers = _minimisers(algo)
        self._schedule = LinearDecay(algo.optimisers.values(), total_steps, config.warmup_steps)
        cut = (bytes_at_once, num_threads) if is_separable(algo) else (None, 1)
        self._slices = Slices(algo.actor, *cut)

    @property
    def version(self) -> int:
        """Version of the weights: number of updates, across restarts."""
        return self.counters.version

    def update(self, batch: BatchT) -> dict[str, float]:
        """Learns from a batch; returns figures to log.

        These are terms, total_loss, metrics and grad_norm (before clipping), each a mean over the
        minibatches, metrics of the whole batch, and learning_rate. With several optimisers the
        figures grad_norm and learning_rate have the optimiser's name in front: "critic_grad_norm".
        A metric of no steps is left out.

        Raises NonFiniteError when a loss or gradient is NaN or infinite, and ValueError when
        `losses` returns terms that cannot be minimised. The weights are then as the previous
        minibatch left them.
        """
        with self._observing(batch):
            with torch.no_grad():
                prepared = self.algo.prepare(batch)
                metrics = checked_metrics(self.algo, self.algo.metrics(prepared))
                of_batch = _divided(_fetch(_addends(metrics, 1.0)))
            figures = _means(list(self._learnt(prepared))) | of_batch
        rates = {f"{m.prefix}learning_rate": m.rate for m in self._minimisers}
        self._count(batch.env_steps)
        return figures | rates

    def _learnt(self, prepared: BatchT) -> Iterator[dict[str, float]]:
        """Learns from one minibatch after the other; yields the figures of each."""
        for minibatch in self.algo.minibatches(prepared):
            figures = self._learn(minibatch)
            yield figures
            if self.algo.stops_after(figures):
                return

    @contextmanager
    def _observing(self, batch: BatchT) -> Iterator[None]:
        """Adds the batch to the running statistics, which are restored if the body fails.

        All minibatches and slices use the same statistics.
        """
        buffers = [buffer for model in self.algo.models.values() for buffer in model.buffers()]
        before = [buffer.clone() for buffer in buffers]
        new = batch.new_observations()
        if all(leaf.shape[1] for leaf in flatten(new)):  # a mask may leave none
            self.algo.actor.observe(new)
        try:
            yield
        except BaseException:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise

    def _learn(self, minibatch: BatchT) -> dict[str, float]:
        """Takes one step of every optimiser; none when no learner has a step to learn from."""
        for minimiser in self._minimisers:
            minimiser.optimiser.zero_grad(set_to_none=True)
        sums = self._slices.backward(minibatch, self._learning_from(minibatch))
        for minimiser in self._minimisers:
            self._join_ranks(gradients_of(minimiser.parameters), self.algo.reduction)
        norms = {m.norm_name: gradient_norm(m.parameters) for m in self._minimisers}
        figures = _divided(_fetch({**sums, **norms}))
        self._check_finite(figures)
        if minibatch.num_steps or any(figures[m.norm_name] for m in self._minimisers):
            self._step(figures)  # without own steps it takes those of the other ranks
        self.counters.learnt_steps += minibatch.num_steps
        return figures

    def _learning_from(self, minibatch: BatchT) -> Callable[[BatchT], dict[str, Tensor]]:
        """Returns a function that adds the gradients of one slice of the minibatch."""
        num_steps = max(1, minibatch.num_steps)  # a mask may leave none

        def learn(columns: BatchT) -> dict[str, Tensor]:
            terms, metrics = checked_losses(self.algo, self.algo.losses(columns))
            share = columns.num_steps / num_steps
            if self.algo.reduction == "mean":
                terms = _scaled(terms, share)
            figures = {**terms, _TOTAL: self._backward(terms), **_addends(metrics, share)}
            return {name: figure.detach() for name, figure in figures.items()}

        return learn

    def _backward(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Adds the gradients of each optimiser's terms to its own parameters; returns the total."""
        totals = self._totals(terms)
        for number, (minimiser, total) in enumerate(totals, start=1):
            total.backward(  # type: ignore[no-untyped-call]
                inputs=minimiser.parameters, retain_graph=number < len(totals)
            )
            _check_connected(self.algo, minimiser)
        return torch.stack([total for _, total in totals]).sum()

    def _totals(self, terms: Mapping[str, Tensor]) -> list[tuple[_Minimiser, Tensor]]:
        """Returns the sum of each optimiser's terms, without optimisers that have none."""
        losses: dict[str, list[Tensor]] = {}
        for term, loss in terms.items():
            losses.setdefault(self._minimised_by(term), []).append(loss)
        return [
            (minimiser, torch.stack(losses[minimiser.name]).sum())
            for minimiser in self._minimisers
            if minimiser.name in losses
        ]

    def _minimised_by(self, term: str) -> str:
        """Returns the name of the optimiser that minimises a term."""
        names = list(self.algo.optimisers)
        found = self.algo.minimised_by.get(term, names[0] if len(names) == 1 else "none")
        _check_minimiser(self.algo, term, found)
        return found

    def _check_finite(self, figures: Mapping[str, float]) -> None:
        """Raises NonFiniteError unless terms, their sum and the gradients are finite.

        figures: terms first, then their sum. Metrics, which follow, may be NaN.
        """
        for name, value in figures.items():
            if not math.isfinite(value):
                raise NonFiniteError(self._failure(f"{name} is {value}"))
            if name == _TOTAL:
                break
        for minimiser in self._minimisers:
            if not math.isfinite(figures[minimiser.norm_name]):
                name = first_non_finite(_named_parameters(self.algo))
                raise NonFiniteError(self._failure(f"the gradient of {name} is not finite"))

    def _failure(self, what: str) -> str:
        """Returns the message of an update that fails."""
        return (
            f"{what} in optimiser step {self.counters.optimiser_steps}; the weights are as before "
            "it. Look for NaN in the observations, or lower the learning rate"
        )

    def _step(self, figures: Mapping[str, float]) -> None:
        """Clips gradients and takes a step, for each optimiser by itself."""
        for minimiser in self._minimisers:
            norm = figures[minimiser.norm_name]
            clip_gradients(minimiser.parameters, norm, self._config.grad_norm_clipping)
            minimiser.optimiser.step()
        self.counters.optimiser_steps += 1
        with torch.no_grad():
            self.algo.after_step()

    def _count(self, env_steps: int) -> None:
        """Counts a learnt batch and sets the learning rates."""
        self.counters.version += 1
        self.counters.env_steps += env_steps
        self._schedule.set(self.counters.env_steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next update depends on; tensors are shared, not copied."""
        counters = {"scheduler_state_dict": self.counters.state_dict()}
        return saving.state_of(self.algo) | counters

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state_dict.

        Raises ValueError, with nothing changed, when it belongs to another model, algorithm or
        optimiser.
        """
        counters = Counters()
        saving.check_state(self.algo, state)
        counters.load_state_dict(state["scheduler_state_dict"])
        saving.restore(self.algo, state)
        self.counters = counters
        self._schedule.set(counters.env_steps)


@dataclass(frozen=True, kw_only=True)
class _Minimiser:
    """An optimiser and the parameters that it trains."""

    name: str
    prefix: str  # of the names of its figures
    optimiser: Optimizer
    parameters: list[nn.Parameter]

    @property
    def norm_name(self) -> str:
        return f"{self.prefix}grad_norm"

    @property
    def rate(self) -> float:
        return float(self.optimiser.param_groups[0]["lr"])


def _minimisers(algo: Algorithm[Any]) -> list[_Minimiser]:
    """Returns the optimisers with their parameters; raises ValueError if one has none."""
    if not algo.optimisers:
        raise ValueError(f"{type(algo).__name__} has no optimiser: add one to `optimisers`")
    for term, name in algo.minimised_by.items():
        _check_minimiser(algo, term, name)
    is_only = len(algo.optimisers) == 1
    minimisers = [
        _Minimiser(
            name=name,
            prefix="" if is_only else f"{name}_",
            optimiser=optimiser,
            parameters=_trainable(optimiser),
        )
        for name, optimiser in algo.optimisers.items()
    ]
    for minimiser in minimisers:
        if not minimiser.parameters:
            raise ValueError(
                f"{type(algo).__name__}'s optimiser {minimiser.name} has no parameter to train: "
                "give it one with requires_grad, or leave the optimiser out"
            )
    return minimisers


def _check_minimiser(algo: Algorithm[Any], term: str, name: str) -> None:
    """Raises ValueError unless the name is that of one of the algorithm's optimisers."""
    if name not in algo.optimisers:
        raise ValueError(
            f"{type(algo).__name__}.minimised_by gives the term {term} to {name}: give it to one "
            f"of its optimisers, {', '.join(algo.optimisers)}"
        )


def _check_connected(algo: Algorithm[Any], minimiser: _Minimiser) -> None:
    """Raises ValueError unless the terms of an optimiser gave one of its parameters a gradient."""
    if all(parameter.grad is None for parameter in minimiser.parameters):
        raise ValueError(
            f"{type(algo).__name__}'s optimiser {minimiser.name} minimises terms that depend on "
            "none of its parameters: give it the parameters of the network that they depend on, "
            "or give them to another optimiser by minimised_by"
        )


def _trainable(optimiser: Optimizer) -> list[nn.Parameter]:
    """Returns the optimiser's parameters that are not frozen."""
    return [p for group in optimiser.param_groups for p in group["params"] if p.requires_grad]


def _named_parameters(algo: Algorithm[Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields all parameters with their names; those of other models than the actor get a prefix."""
    for model_name, model in algo.models.items():
        prefix = "" if model is algo.actor else f"{model_name}."
        yield from model.named_parameters(prefix.removesuffix("."))


def _scaled(figures: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    return {name: share * figure for name, figure in figures.items()}


def _addends(metrics: Mapping[str, Tensor | Mean], share: float) -> dict[str, Tensor]:
    """Returns what slices add up: share * metric, or total and number of steps of a Mean."""
    addends: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            addends |= {name: metric.total, _STEPS_OF + name: metric.steps}
        else:
            addends[name] = share * metric
    return addends


def _divided(figures: Mapping[str, float]) -> dict[str, float]:
    """Divides each total of a Mean by its number of steps, or leaves it out where that is 0."""
    steps = {name: figures.get(_STEPS_OF + name, 1.0) for name in figures}
    return {
        name: figure / steps[name]
        for name, figure in figures.items()
        if steps[name] and not name.startswith(_STEPS_OF)
    }


def _fetch(figures: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the figures as floats, with a single transfer from the device."""
    if not figures:
        return {}
    values = torch.stack([value.detach().float() for value in figures.values()])
    return dict(zip(figures, values.tolist(), strict=True))


def _means(learnt: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each figure over the minibatches that have it."""
    if not learnt:
        raise ValueError("minibatches() yielded none: yield at least one for each batch")
    values: dict[str, list[float]] = {}
    for figures in learnt:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
