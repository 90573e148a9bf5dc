# SPDX-License-Identifier: Apache-2.0
"""The update that all algorithms share: from a batch to new weights.

batch -> statistics -> prepare, metrics -> for each minibatch, until stops_after:
    gradients of its slices -> joined over learners -> checked -> clipped -> step -> adapt
-> a new version of the weights

Several learners do the same side by side, with one OptimiserStep each, and join what they found at
two places: the statistics of observations, and the gradients (`ranks.py`). Or others compute the
gradients (`begin`, `contribution`), and one OptimiserStep applies them (`apply`, `count`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from torchbeast.core.algos.base import Algorithm, BatchT, Counters, Optimizer, check_scalars
from torchbeast.core.algos.config import (
    Schedule,
    StepConfig,
    schedules_of,
    settings_of,
    with_values,
)
from torchbeast.core.losses import Mean
from torchbeast.core.storages.batch import NO_FEEDBACK, Feedback
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update import saving
from torchbeast.core.update.minibatch import (
    TOTAL,
    Learn,
    MinibatchReport,
    Slices,
    addends,
    clip_gradients,
    divided,
    fetched,
    first_non_finite_gradient,
    gradient_norm,
    joined_feedback,
    means,
)
from torchbeast.core.update.ranks import (
    Contribution,
    JointGradients,
    Ranks,
    Statistics,
    added_in_order,
    check_same_step,
    keeping_buffers,
)
from torchbeast.errors import UsageError

RATE = "learning_rate"


class Schedules:
    """Changes the settings of an algorithm that have a schedule, and its learning rates.

    Learning rates without a schedule in the algorithm's Config go linearly to 0. All learning rates
    also grow linearly from 0 over the first warmup_steps of the run.

    Attributes:
        of: The schedules, by setting.
    """

    def __init__(self, algo: Algorithm[Any], total_steps: int, warmup_steps: int = 0) -> None:
        self._algo, self._config = algo, algo.config
        self._total_steps, self._warmup_steps = total_steps, warmup_steps
        settings = settings_of(algo.config) if is_dataclass(algo.config) else {}
        self.of = schedules_of({name: value for name, (_, value) in settings.items()})
        usual = self.of.get(RATE, Schedule(1.0))
        rates = [float(group["lr"]) for group in self._groups()]
        self._rates = [
            replace(usual, initial=rate, final=usual.final and rate / usual.initial * usual.final)
            for rate in rates
        ]
        self.of[RATE] = next(iter(self._rates), usual)

    def set(self) -> dict[str, float]:
        """Sets the values for the next update; returns those that change, but learning rates."""
        step = self._algo.counters.env_steps
        warmth = min(1.0, step / self._warmup_steps) if self._warmup_steps else 1.0
        for group, rate in zip(self._groups(), self._rates, strict=True):
            group["lr"] = self._value(RATE, rate) * warmth
        others = {name: schedule for name, schedule in self.of.items() if name != RATE}
        changing = {name: self._value(name, of) for name, of in others.items() if of.changes}
        if changing:
            self._algo.config = with_values(self._config, changing)
        return changing

    def _value(self, name: str, schedule: Schedule) -> float:
        counters = self._algo.counters
        start = counters.schedule_starts.get(name, 0)
        return schedule.at(counters.env_steps, self._total_steps, start)

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the present groups, which loading a state replaces in a torch.optim optimiser."""
        optimisers = self._algo.optimisers.values()
        return [group for optimiser in optimisers for group in optimiser.param_groups]


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite; the weights are as before the optimiser step."""


def is_separable(algo: Algorithm[Any]) -> bool:
    """Returns whether algorithm and actor both allow learning from slices of a batch."""
    return algo.separable and algo.actor.separable


class UpdateResult(NamedTuple):
    """The result of an update."""

    metrics: dict[str, float]
    """The numbers to log, by name of the column."""
    feedback: Feedback = NO_FEEDBACK
    """Priorities and final states, for the replay that the batch came from."""


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
        ranks: Ranks | None = None,
    ) -> None:
        """Prepares updates; raises ValueError when the algorithm's optimisers are incomplete, and
        UsageError for a max_lag of an algorithm that does not train on rollouts.

        total_steps: env steps at which schedules end.
        bytes_at_once: bytes of observations in a slice of a batch; None: the whole batch.
        num_threads: threads that learn from slices. Like the size of slices it changes speed and
            the last digits of results only; a batch that is not separable is learnt in one slice.
        ranks: all learners that take every optimiser step together; None: this one alone.
        """
        trains_on_any_age = algo.burns_in or not issubclass(algo.takes, Rollout)
        if config.max_lag is not None and trains_on_any_age:
            raise UsageError(
                f"max_lag limits the age of rollouts, but {type(algo).__name__} trains on replayed "
                "steps of any age: remove it"
            )
        self.algo = algo
        self._config = config
        self._ranks = ranks
        is_only = len(algo.optimisers) == 1
        self._minimisers = [_Minimiser(*item, is_only) for item in algo.optimisers.items()]
        parameters = [p for minimiser in self._minimisers for p in minimiser.parameters]
        _check_parts(algo, parameters)
        self._joining = JointGradients(parameters, algo.reduction)
        self.statistics = Statistics(algo)
        self.schedules = Schedules(algo, total_steps, config.warmup_steps)
        cut = (bytes_at_once, num_threads) if is_separable(algo) else (None, 1)
        self._slices = Slices(algo.actor, *cut)
        self._steps_then, self._weights_version = -1, 0  # at the last change of the weights
        self._set_schedules()

    @property
    def counters(self) -> Counters:
        """Counts from the start of the run, across restarts, which the algorithm reads too."""
        return self.algo.counters

    @property
    def version(self) -> int:
        """Version of the weights: number of updates, across restarts."""
        return self.counters.version

    def update(self, batch: BatchT) -> UpdateResult:
        """Learns from a batch.

        The metrics are terms, total_loss, those of `losses`, and grad_norm (before clipping), each
        a mean over the minibatches; those of the whole batch; and learning_rate. With several
        optimisers the metrics grad_norm and learning_rate have the optimiser's name in front:
        "critic_grad_norm". A minibatch without a valid step does not count there, and a metric of
        no steps is left out.

        Raises NonFiniteError when a loss or gradient is NaN or infinite, and ValueError when
        `losses` returns terms that cannot be minimised. The weights are then as the previous
        minibatch left them.
        """
        learnt: list[tuple[dict[str, float], MinibatchReport]] = []
        find = self._found if self._ranks is None else self._found_together
        with self.restored_on_error():
            if self._ranks is None:
                with torch.no_grad():
                    self.algo.observe(batch)
                minibatches, of_batch = self._begin(batch)
            else:
                self.statistics.join(batch, self._ranks)
                minibatches, of_batch = self.begin(batch)
            for number, minibatch in enumerate(minibatches):
                report = find(minibatch, number, 0 if number else batch.env_steps)
                metrics = self._apply(report)
                learnt.append((metrics, report))
                if metrics and self.algo.stops_after(metrics):
                    break
            if not learnt:
                raise ValueError("minibatches() yielded none: yield one or more for each batch")
        metrics = means(report for report, _ in learnt) | of_batch
        metrics |= self.count(sum(report.env_steps for _, report in learnt))
        feedback = [report.feedback for _, report in learnt]
        return UpdateResult(metrics, joined_feedback(feedback, batch.batch_size))

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restores all buffers of the models, such as running statistics, if the body fails."""
        every = (buffer for model in self.algo.models.values() for buffer in model.buffers())
        buffers = [buffer for buffer in every if not buffer.is_inference()]  # nobody writes to it
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        except BaseException:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise

    def begin(self, batch: BatchT) -> tuple[Iterator[BatchT], dict[str, float]]:
        """Prepares one of several learners' batches; returns its minibatches, and metrics of the
        whole batch. Without `update`, another OptimiserStep applies its gradients.
        """
        with keeping_buffers(self.algo, "prepare or metrics"):
            return self._begin(batch)

    def _begin(self, batch: BatchT) -> tuple[Iterator[BatchT], dict[str, float]]:
        with torch.no_grad():
            recent, more = self._recent(batch)
            prepared = self.algo.prepare(recent)
            metrics = self.algo.metrics(prepared)
            of_batch = divided(fetched(addends({**metrics, **more}, 1.0)))
        return iter(self.algo.minibatches(prepared)), of_batch

    def _recent(self, batch: Any) -> tuple[BatchT, dict[str, Mean]]:
        """Returns the batch without the steps above max_lag, and a metric of their share.

        A lag is counted from the newest weights that differ from those before. Otherwise updates
        without a step to learn from would make every later batch too old as well.
        """
        if self._config.max_lag is None:
            return batch, {}
        if self.counters.optimiser_steps != self._steps_then:
            self._steps_then, self._weights_version = self.counters.optimiser_steps, self.version
        recent, share = batch.without_older(self._weights_version - self._config.max_lag)
        return recent, {"too_old_share": share}

    def contribution(self, minibatch: BatchT, number: int, env_steps: int) -> Contribution:
        """Returns the gradients of a minibatch, for `apply`; changes no weight.

        number: of the minibatch in its batch. env_steps: newly collected, that no other counts.
        """
        with keeping_buffers(self.algo, "losses"):
            report = self._found(minibatch, number, env_steps)
        return self._joining.packed(report)

    def apply(self, contributions: Sequence[Contribution]) -> dict[str, float]:
        """Takes one step of every optimiser, with the gradients of all; returns its metrics.

        The result is the same as one learner's with all their minibatches in one. Raises
        NonFiniteError as `update` does.
        """
        messages = [contribution.message for contribution in contributions]
        check_same_step(messages)
        total = added_in_order([contribution.gradients for contribution in contributions])
        return self._apply(self._joining.unpacked(messages, total))

    def count(self, env_steps: int) -> dict[str, float]:
        """Counts a learnt batch and sets what depends on the counters; returns the learning rates
        and other scheduled settings that the batch was learnt with, and the metrics of the
        algorithm's schedule.
        """
        rates = {
            minimiser.rate_name: float(minimiser.optimiser.param_groups[0]["lr"])
            for minimiser in self._minimisers
        }
        self.counters.version += 1
        self.counters.env_steps += env_steps
        return {**rates, **self._scheduled, **self._set_schedules()}

    def restart_schedules(self, names: Collection[str]) -> None:
        """Begins the schedules of these settings anew, at the present step."""
        self.counters.schedule_starts |= dict.fromkeys(names, self.counters.env_steps)
        self._set_schedules()

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Replaces the counters by a state_dict of theirs, and sets what depends on them."""
        self.counters.load_state_dict(counters)
        self._set_schedules()

    @torch.no_grad()
    def _set_schedules(self) -> Mapping[str, float]:
        self._scheduled = self.schedules.set()
        return self.algo.schedule()

    def _found(self, minibatch: BatchT, number: int, env_steps: int) -> MinibatchReport:
        """Computes the gradients of a minibatch; returns what else was found in it."""
        for minimiser in self._minimisers:
            minimiser.optimiser.zero_grad()
        num_steps = minibatch.num_steps  # with a mask, this waits for the device
        sums, feedback = self._slices.backward(minibatch, self._learning_from(num_steps))
        return MinibatchReport(sums, num_steps, env_steps, number, feedback)

    def _found_together(self, minibatch: BatchT, number: int, env_steps: int) -> MinibatchReport:
        """Computes the gradients of all ranks' minibatches; returns what they found together."""
        assert self._ranks is not None
        contribution = self.contribution(minibatch, number, env_steps)
        messages = self._ranks.gather(contribution.message)
        check_same_step(messages)  # before vectors of different lengths are added up
        return self._joining.unpacked(messages, self._ranks.add(contribution.gradients))

    def _apply(self, report: MinibatchReport) -> dict[str, float]:
        """Takes one step of every optimiser; returns its metrics. Without a step to learn from, in
        any learner, it takes none and returns {}.
        """
        norms = {m.norm_name: gradient_norm(m.parameters) for m in self._minimisers}
        metrics = divided(fetched({**report.metrics, **norms}))
        self._check_finite(metrics)
        if not report.steps and not any(metrics[m.norm_name] for m in self._minimisers):
            return {}
        self._step(metrics)
        self.counters.learnt_steps += report.steps
        return metrics

    def _learning_from(self, num_steps: int) -> Learn:
        """Returns a function that adds the gradients of one slice of a minibatch of so many
        steps.
        """

        def learn(columns: BatchT) -> tuple[dict[str, Tensor], Feedback]:
            losses = self.algo.losses(columns)
            check_scalars(self.algo, losses)
            terms, metrics, feedback = losses
            share = columns.num_steps / max(1, num_steps)  # a mask may leave none
            if not num_steps:
                metrics = {}
            if self.algo.reduction == "mean":
                terms = {name: share * term for name, term in terms.items()}
            summands = {**terms, TOTAL: self._backward(terms), **addends(metrics, share)}
            return {name: summand.detach() for name, summand in summands.items()}, feedback

        return learn

    def _backward(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Adds the gradients of each optimiser's terms to its own parameters; returns the total."""
        only = self._minimisers[0].name if len(self._minimisers) == 1 else None
        losses: dict[str, list[Tensor]] = {each.name: [] for each in self._minimisers}
        for term, loss in terms.items():
            losses[only or self.algo.minimised_by[term]].append(loss)
        totals = [
            (minimiser.parameters, torch.stack(own).sum())
            for minimiser in self._minimisers
            if (own := losses[minimiser.name])
        ]
        for number, (parameters, total) in enumerate(totals, start=1):
            trained = [p for p in parameters if p.requires_grad]
            if trained and total.requires_grad:  # else whatever it would move is frozen
                total.backward(  # type: ignore[no-untyped-call]
                    inputs=trained, retain_graph=number < len(totals)
                )
        return torch.stack([total for _, total in totals]).sum()

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        """Raises NonFiniteError unless terms, their sum and the gradients are finite.

        metrics: terms first, then their sum. Metrics, which follow, may be NaN.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(self._failure(f"{name} is {value}"))
            if name == TOTAL:
                break
        for minimiser in self._minimisers:
            if not math.isfinite(metrics[minimiser.norm_name]):
                name = first_non_finite_gradient(nn.ModuleDict(self.algo.models).named_parameters())
                raise NonFiniteError(self._failure(f"the gradient of {name} is not finite"))

    def _failure(self, what: str) -> str:
        """Returns the message of an update that fails."""
        return (
            f"{what} in optimiser step {self.counters.optimiser_steps}. The weights were not "
            "changed. Check observations and rewards for NaN or very large values, or lower the "
            "learning rate"
        )

    def _step(self, metrics: Mapping[str, float]) -> None:
        """Clips gradients and takes a step, for each optimiser separately."""
        for minimiser in self._minimisers:
            norm = metrics[minimiser.norm_name]
            clip_gradients(minimiser.parameters, norm, self._config.grad_norm_clipping)
            minimiser.optimiser.step()
        self.counters.optimiser_steps += 1
        with torch.no_grad():
            self.algo.adapt(metrics)
            self.algo.after_step()

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
        counters.load_state_dict(state["scheduler_state_dict"])
        saving.restore(self.algo, state)
        self.algo.counters = counters
        self._set_schedules()


def _check_parts(algo: Algorithm[Any], parameters: Sequence[nn.Parameter]) -> None:
    """Raises ValueError unless optimisers divide parameters among themselves, and models have names
    that a module can have.
    """
    name = type(algo).__name__
    if not parameters:
        raise ValueError(f"{name} has no optimiser with parameters: set self.optimisers")
    if len({*map(id, parameters)}) < len(parameters):
        raise ValueError(
            f"{name}: its optimisers have the same parameter twice, and would move it twice in "
            "every step: give every parameter once, to one optimiser"
        )
    try:
        nn.ModuleDict(algo.models)
    except KeyError as error:
        raise ValueError(f"{name}.models: {error.args[0]}: use another name") from error


class _Minimiser:
    """An optimiser and its parameters, frozen ones included, and the names of its metrics."""

    def __init__(self, name: str, optimiser: Optimizer, is_only: bool) -> None:
        self.name, self.optimiser = name, optimiser
        self.parameters = [p for group in optimiser.param_groups for p in group["params"]]
        prefix = "" if is_only else f"{name}_"
        self.norm_name, self.rate_name = f"{prefix}grad_norm", f"{prefix}{RATE}"
