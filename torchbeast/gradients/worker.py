# SPDX-License-Identifier: Apache-2.0
"""A gradient worker: a source of batches, and a copy of the learner that computes gradients.

    start()        makes source and learner
    collect()      takes the batch of a round                       synchronous
    step()         computes gradients of the next minibatch; asynchronous workers take the next
                   batch if necessary                               centralised
    update()       updates, together with the other ranks           decentralised
    state()        returns the state of the learner                 decentralised
    stop_early()   cuts the current batch short                     at any time
    place()        returns where it runs                            at any time
    end()          ends the source                                  at any time
    close()        ends what the source has started                 after all others

A learner that was interrupted while it waited for `start`, `collect` or `update` calls it again
with the same number. If the first call succeeded, the second returns the same result.

Threads: one thread calls all methods, except that other threads may call `stop_early`, `place` and
`end`. This module does not know about processes or Ray. The learner sends a function that makes the
parts of a worker:

    make(index, ranks, stops_early) -> WorkerParts(source, optimiser_step, ...)
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.collect.contract import Source
from torchbeast.collect.joint import BatchReport, load_state, report_of, saved_state
from torchbeast.collect.weights import Packed, unpacked
from torchbeast.core.base.computing import own_settings
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.core.update.ranks import Contribution, Ranks
from torchbeast.core.update.torch_ranks import RankGone, TorchRanks, store_at
from torchbeast.errors import RunError, error_of, failure
from torchbeast.fleets.child_process import show_output
from torchbeast.fleets.fleet import FleetWorker
from torchbeast.fleets.supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """The parts of a worker."""

    source: Source
    optimiser_step: OptimiserStep[Any]
    publish: Callable[[nn.Module, int], None] = lambda model, version: None
    """Gives the source the weights to act with, and their version, before each batch. Called with
    the model of the optimiser step."""
    end: Callable[[], None] = lambda: None
    """Ends what the source has started, such as environments or processes, after closing it."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the models, to which batches are moved."""


Make = Callable[[int, Ranks | None, Callable[[float], bool]], WorkerParts]
"""Makes the parts of a worker, in its process. It is pickled by cloudpickle if that is installed,
otherwise by pickle.

index: of the worker; use it to give its environments and random generators different seeds.
ranks: for the OptimiserStep; None: another process applies the gradients.
stops_early: a source that can be cut short calls it after every step, with the collected share of
    its batch. If it returns True, the batch ends: its other steps are marked as not valid, repeat
    the last row, and do not count as collected.
"""

Meeting = tuple[str, int, str]
"""Host and port of a store at which ranks meet, and the device of their gradients, "cpu" or "cuda".
"""

PackedWeights = tuple[Packed, tuple[bool, ...]]
"""The weights of all models of an algorithm, and requires_grad of each parameter."""

Updated = tuple[dict[str, float], dict[str, int]] | str
"""The metrics of all ranks, except that metrics of the whole batch are the rank's own, and the
counters; or the reason why a loss or gradient is not finite."""


def _reporting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method return an error in place of raising an exception."""

    @functools.wraps(method)
    def call(self: GradientWorker, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except RankGone as error:
            return error
        except Exception as error:
            if self.ranks is not None:  # tells the others why this one ends
                said = str(error).strip().splitlines()
                self.ranks.leave(said[-1] if said else repr(error))
            return error_of(failure(error))

    return call


class GradientWorker(FleetWorker):
    """Computes gradients for the learner; see the module."""

    LANES: ClassVar[Mapping[str, str]] = dict.fromkeys(("stop_early", "place", "end"), "control")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._supervisor = Supervisor()
        self.ranks: TorchRanks | None = None
        self._is_started = False
        self._round = -1  # number of the batch
        # Numbers of the last batch and of the last update, and what was returned about them.
        self._collected: tuple[int, BatchReport] = -1, BatchReport({}, {})
        self._updated: tuple[int, Updated] = -1, ""
        self._stopped = -1, 0.0  # number of a batch to cut short, and its share to collect first
        self._version = 0  # of the weights
        self._minibatches: Iterator[Contribution] = iter(())

    @_reporting
    def start(
        self, make: bytes, index: int, count: int, meeting: Meeting | None, state: bytes
    ) -> None:
        """Makes source and learner.

        make: a pickled `Make`. meeting: where ranks meet; None: another process applies the
        gradients. state: of the learner.
        """
        if self._is_started:
            return
        make_parts: Make = pickle.loads(make)
        if meeting is not None:
            host, port, device = meeting
            store = store_at(host, port)
            self.ranks = TorchRanks(store, index, count, device=torch.device(device))
        self._parts = made = make_parts(index, self.ranks, self._stops_early)
        self._closing.callback(made.end)
        self._step = made.optimiser_step
        self._models = nn.ModuleDict(self._step.algo.models)
        load_state(self._step, state)
        self._publish(self._step.version)
        show_output()  # of workers that collect for this one; its own output is logged
        made.source.start(self._supervisor)
        self._supervisor.on_close(made.source.close)
        self._batches = iter(made.source.batches())
        self._is_started = True

    @_reporting
    def collect(
        self, number: int, counters: Mapping[str, int], weights: PackedWeights | None
    ) -> BatchReport:
        """Loads newer weights, if given, and takes the batch of this round.

        number: of the round. counters: the run's counters at the weights that the worker then has.
        """
        self._load(counters, weights)
        if number != self._collected[0]:
            self._publish(counters["version"])
            self._collected = number, self._collect(number)
        return self._collected[1]

    @_reporting
    def update(self, number: int, trained: tuple[bool, ...]) -> Updated:
        """Updates with the batch of this round, together with the other ranks. If a loss or
        gradient is not finite, it changes nothing.

        trained: see PackedWeights.
        """
        if number != self._updated[0]:
            self._freeze(trained)
            try:
                with own_settings():
                    metrics = self._step.update(self._batch).metrics
                self._updated = number, (metrics, self._step.counters.state_dict())
            except NonFiniteError as error:
                self._updated = number, str(error)
        return self._updated[1]

    @_reporting
    def step(
        self, counters: Mapping[str, int], weights: PackedWeights | None, goes_on: bool
    ) -> tuple[BatchReport | None, Contribution | None]:
        """Loads newer weights, if given, and returns the gradients of the next minibatch, with the
        report of the batch if it is the first one. After the last minibatch of a batch it returns
        None once.

        goes_on: continue with the same batch; False: skip the rest of it.
        """
        self._load(counters, weights)
        if goes_on:
            return None, self._next_contribution()
        self._publish(counters["version"])
        return self._collect(self._round + 1), self._next_contribution()

    @_reporting
    def state(self) -> bytes:
        """Returns the state of the learner."""
        return saved_state(self._step)

    def stop_early(self, number: int, fraction: float) -> None:
        """Ends collection in this round as soon as the batch has this share of its steps."""
        self._stopped = number, fraction

    def end(self) -> None:
        """Ends the source, and thereby every wait for a batch."""
        self._supervisor.stop("the run ended")

    def _stops_early(self, share: float) -> bool:
        number, least = self._stopped
        return number == self._round and share >= least

    def _collect(self, number: int) -> BatchReport:
        self._round = number
        taken = next(self._batches, None)
        if taken is None:
            failed = self._supervisor.failure
            raise RunError("the source has ended") if failed is None else failed.error
        device = self._parts.device
        self._batch = batch = taken.map(lambda leaf: leaf.to(device))
        observed: list[Any] = []
        if self.ranks is None:
            with own_settings():
                seen = self._step.statistics.observed(batch)
                observed = [[part.cpu().numpy() for part in moments] for moments in seen]
            self._minibatches = self._contributions(batch)
        return report_of(self._parts.source, taken, self._version)._replace(observed=observed)

    def _next_contribution(self) -> Contribution | None:
        with own_settings():
            return next(self._minibatches, None)

    def _contributions(self, batch: Any) -> Iterator[Contribution]:
        """Yields the gradients of the minibatches as arrays. Their messages also contain the number
        of optimiser steps of the weights, and the first message metrics of the whole batch.
        """
        minibatches, metrics = self._step.begin(batch)
        number = -1
        for number, minibatch in enumerate(minibatches):
            env_steps = 0 if number else batch.env_steps
            message, gradients = self._step.contribution(minibatch, number, env_steps)
            steps = self._step.counters.optimiser_steps
            more = {"optimiser_steps": steps, "batch_metrics": {} if number else metrics}
            yield Contribution(message | more, gradients.cpu().numpy())
        if number < 0:
            raise ValueError("minibatches() yielded none: yield one or more for each batch")

    def _load(self, counters: Mapping[str, int], weights: PackedWeights | None) -> None:
        if weights is not None:
            packed, trained = weights
            self._models.load_state_dict(unpacked(packed, self._models))
            self._freeze(trained)
        if self.ranks is None:  # otherwise this worker counts its own steps
            self._step.set_counters(counters)  # after the weights, whose counters may be older

    def _freeze(self, trained: tuple[bool, ...]) -> None:
        for parameter, is_trained in zip(self._models.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)

    def _publish(self, version: int) -> None:
        self._version = version
        self._parts.publish(self._step.algo.actor, version)


def as_tensor(array: np.ndarray) -> Tensor:
    """Returns a received array as a tensor; a copy if it is read-only, as in Ray's memory."""
    return torch.from_numpy(np.require(array, requirements="W"))
