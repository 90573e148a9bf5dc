# SPDX-License-Identifier: Apache-2.0
"""Updates by several gradient workers; a learner uses them as it uses an OptimiserStep.

    Centralised     every minibatch: gradients of all --> the centre's step --> weights to all
    Asynchronous    gradients of one --> the centre's step --> weights to this one
    Decentralised   the workers join their gradients among themselves, and each takes the step

`env_steps` counts those of all workers, and `version` the updates: rounds in which all took part,
or with asynchronous workers batches of one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchbeast.core.actors.running_norm import Moments
from torchbeast.core.algos.base import Algorithm, Counters
from torchbeast.core.algos.figures import means
from torchbeast.core.algos.optimiser_step import Learnt, NonFiniteError, OptimiserStep
from torchbeast.errors import RunError
from torchbeast.schemes.fleet import Fleet
from torchbeast.schemes.gathering import Task
from torchbeast.schemes.gradients.config import GradientConfig
from torchbeast.schemes.gradients.contract import Make
from torchbeast.schemes.gradients.round import Round
from torchbeast.schemes.gradients.worker import (
    Begun,
    Collected,
    Contributed,
    Finished,
    NotFinite,
    as_tensor,
    load,
    saved,
)
from torchbeast.schemes.gradients.workers import GradientWorkers

_ENDED = "the run has ended"


class GatheredStep:
    """The update of several workers. Used by one thread at a time."""

    def __init__(self, workers: GradientWorkers) -> None:
        self.workers = workers
        self._centre: OptimiserStep[Any] = workers.centre

    @property
    def algo(self) -> Algorithm[Any]:
        """The algorithm of this process; with decentralised updates as of the last `state_dict`."""
        return self._centre.algo

    @property
    def counters(self) -> Counters:
        """Counts of all workers together."""
        return self._centre.counters

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._centre.version

    def update(self, batch: Round) -> Learnt:
        """Learns from the batches of a round, see OptimiserStep."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next update depends on, see OptimiserStep."""
        return self._centre.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state_dict, between two updates."""
        self._centre.load_state_dict(state)
        self.workers.changed()


class Centralised(GatheredStep):
    """Synchronous gradients, which the centre applies."""

    def update(self, batch: Round) -> Learnt:
        """Takes a step with the gradients of all workers for each of their minibatches."""
        centre, learnt, metrics = self._centre, [], []
        with centre.statistics.restored_on_error():
            self._observe([each.observed for each in batch.collected])
            for contributed in self._contributions():
                metrics += [each.metrics for each in contributed]
                learnt.append(centre.apply([each.contribution() for each in contributed]))
                self.workers.changed()
                if centre.algo.stops_after(learnt[-1]):
                    break
        return Learnt(means(learnt) | means(metrics) | centre.count(batch.env_steps))

    def _contributions(self) -> Iterator[list[Contributed]]:
        """Yields the shares of all workers in one optimiser step after the other."""
        workers = self.workers

        def task(index: int) -> Task:
            return Task("contribute", (workers.counters, workers.newer_weights(index)))

        while True:
            answers = _needed(workers.ask_all(task))
            ended = [isinstance(answer, Finished) for answer in answers]
            if all(ended):
                return
            _check_all_go_on(ended)
            yield answers

    def _observe(self, observed: Sequence[Sequence[Sequence[np.ndarray]]]) -> None:
        """Adds what workers observed to the centre's running statistics."""
        if any(observed):
            self._centre.statistics.add([_moments(each) for each in observed])
            self.workers.changed()


class Asynchronous(Centralised):
    """Gradients that the centre applies one after the other, as they come.

    A worker gets newer weights with every minibatch. Its gradient is dropped if the centre has
    taken more than `max_lag` steps since then.
    """

    def __init__(self, workers: GradientWorkers) -> None:
        super().__init__(workers)
        self._dropped = 0

    def update(self, batch: Round) -> Learnt:
        """Takes steps with gradients as they come, until a worker has finished its batch."""
        later = itertools.chain.from_iterable(self.workers.contributions)
        with self._centre.statistics.restored_on_error():
            for index, answer in itertools.chain(batch.answers, later):
                if answer is None:
                    break
                if self._is_last(index, answer):
                    return Learnt(self._finished(batch, *self.workers.learning.pop(index)))
        raise RunError(_ENDED)

    def _is_last(self, index: int, answer: Begun | Contributed | Finished) -> bool:
        """Learns from an answer; returns whether the worker's batch ends with it."""
        if isinstance(answer, Finished):
            return True
        if isinstance(answer, Begun):
            self._observe([answer.collected.observed])
            self.workers.took(index, answer.collected)
            self.workers.learning[index] = answer.collected, []
            answer = answer.contributed
        lag = self._centre.counters.optimiser_steps - answer.steps
        if lag > self.workers.config.max_lag:
            self._dropped += 1
            return False
        figures = self._centre.apply([answer.contribution()])
        self.workers.changed()
        learnt = self.workers.learning[index][1]
        learnt.append({**figures, **answer.metrics, "gradient_lag": float(lag)})
        return self._centre.algo.stops_after(figures)

    def _finished(
        self, batch: Round, collected: Collected, learnt: list[dict[str, float]]
    ) -> dict[str, float]:
        """Counts a worker's batch; returns the figures of what was learnt from it."""
        batch.collected.append(collected)
        lags = batch.lags(self.version)
        self.workers.figures = {"dropped_gradients": self._dropped}
        figures = means(learnt) if learnt else {"total_loss": math.nan}
        return figures | lags | self._centre.count(collected.env_steps)


class Decentralised(GatheredStep):
    """Synchronous gradients that the workers join, and each of them applies."""

    def update(self, batch: Round) -> Learnt:
        """Lets all workers learn from their batches together."""
        task = Task("update", (self.workers.trained,))
        answers = _needed(self.workers.ask_all(lambda index: task))
        for answer in answers:
            if isinstance(answer, NotFinite):
                raise NonFiniteError(answer.error)
        self.counters.load_state_dict(answers[0].counters)
        return Learnt(means(answer.figures for answer in answers))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the workers, which all have the same."""
        if self.workers.has_started:
            load(self._centre, self.workers.ask_first("state"))
        return self._centre.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state_dict in every worker."""
        self._centre.load_state_dict(state)
        if self.workers.has_started:
            task = Task("load", (saved(self._centre),))
            _needed(self.workers.ask_all(lambda index: task))


@contextlib.contextmanager
def gradient_workers(
    make: Make, config: GradientConfig, centre: OptimiserStep[Any], fleet: Fleet
) -> Iterator[tuple[GradientWorkers, GatheredStep]]:
    """Yields the source and the optimiser step of a learner with gradient workers.

    centre: the learner of this process: with centralised updates it applies the gradients, with
    decentralised ones it only holds the state that is saved. fleet: of WORKERs, see `workers.py`.
    """
    workers = GradientWorkers(make, config, centre, fleet)
    kind: type[GatheredStep] = Decentralised if config.is_decentralised else Centralised
    with contextlib.closing(workers):
        yield workers, (kind if config.is_synchronous else Asynchronous)(workers)


def _needed(answers: list[Any] | None) -> list[Any]:
    """Returns the answers; raises RunError if the run ended before they were there."""
    if answers is None or any(answer is None for answer in answers):
        raise RunError(_ENDED)
    return answers


def _check_all_go_on(ended: Sequence[bool]) -> None:
    if any(ended):
        raise ValueError(
            f"minibatches() ended in some workers and not in others, {ended}: it must yield "
            "equally many in each of them"
        )


def _moments(observed: Sequence[Sequence[np.ndarray]]) -> list[Moments]:
    return [Moments(*map(as_tensor, parts)) for parts in observed]
