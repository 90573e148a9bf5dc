# SPDX-License-Identifier: Apache-2.0
"""One gradient worker: a source of batches, and a learner's copy that computes gradients of them.

    start()        makes both
    collect()      takes the next batch                             synchronous
    contribute()   the gradients of its next minibatch              synchronous, centralised
    update()       learns from it, together with the other ranks    decentralised
    step()         the gradients of the next minibatch, of the next batch where there is none left
                                                                    asynchronous
    state()        everything that the next update depends on       decentralised
    stop_early()   cuts the batch that is being collected short     beside them
    place()        where it runs                                    beside them
    end()          ends the source                                  beside them
    close()        ends what the source has started                 after all others

Threads: `stop_early`, `place` and `end` may be called by others while one thread calls the rest.
Nothing here knows of processes or Ray.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchbeast.core.actors.running_norm import Moments
from torchbeast.core.algos.figures import divided
from torchbeast.core.algos.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.core.algos.ranks import Contribution
from torchbeast.core.algos.torch_ranks import RankGone, TorchRanks, store_at
from torchbeast.core.ambient import own_settings
from torchbeast.processes.child_main import failure
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes.fleet import Place as Where
from torchbeast.schemes.gradients.contract import Made, Make, Place
from torchbeast.schemes.worker import Failed, Packed, packed, unpacked


class Meeting(NamedTuple):
    """Where ranks meet: a store that another process serves.

    device: of their gradients, "cpu" or "cuda".
    """

    host: str
    port: int
    device: str


class Weights(NamedTuple):
    """The weights of all models of an algorithm.

    trained: which parameters are not frozen at present, by requires_grad.
    """

    packed: Packed
    trained: tuple[bool, ...]


class Collected(NamedTuple):
    """A batch that a worker has collected and keeps."""

    env_steps: int
    lags: Mapping[str, float]  # behind the newest weights that the worker had
    version: int  # of these weights
    episodes: tuple[list[float], list[int]]  # returns and lengths
    info: dict[str, list[float]]  # theirs, by keyword
    observed: list[list[np.ndarray]]  # what it adds to the running statistics
    status: Mapping[str, float]  # of its source
    seconds: Mapping[str, float]  # of its source, since the start


class Contributed(NamedTuple):
    """A worker's share of an optimiser step.

    steps: those of the weights that it was computed with. metrics: of the whole batch, given with
    its first minibatch.
    """

    message: dict[str, Any]
    gradients: np.ndarray
    steps: int
    metrics: Mapping[str, float]

    def contribution(self) -> Contribution:
        """Returns it as an OptimiserStep applies it."""
        return Contribution(self.message, as_tensor(self.gradients))


class Begun(NamedTuple):
    """The first contribution of a batch that an asynchronous worker has collected."""

    collected: Collected
    contributed: Contributed


class Finished(NamedTuple):
    """There is no minibatch left."""


class Updated(NamedTuple):
    """A worker's update, with all the others.

    figures: of all of them, except for the metrics of the whole batch, which are its own.
    """

    figures: dict[str, float]
    counters: dict[str, int]


class NotFinite(NamedTuple):
    """An update that changed nothing, because a loss or gradient was not finite."""

    error: str


class GradientWorker:
    """Computes gradients on request."""

    LANES: ClassVar[Mapping[str, str]] = {
        "stop_early": "control",
        "place": "control",
        "end": "control",
    }

    def __init__(self, name: str) -> None:
        self._name = name
        self._supervisor = Supervisor()
        self._made: Made | None = None
        self._ranks: TorchRanks | None = None
        self._round = self._stopped_round = -1  # counts batches
        self._least = 0.0  # share of the batch of the round that is stopped
        self._version = 0  # of the weights
        self._minibatches: Iterator[Contributed] = iter(())

    def __repr__(self) -> str:
        return self._name

    def place(self) -> Where:
        """Returns where the worker runs; it does not know its node."""
        return Where(socket.gethostname(), os.getpid(), "")

    def start(
        self, make: bytes, index: int, count: int, meeting: Meeting | None, state: bytes
    ) -> Failed | None:
        """Makes source and learner.

        make: a pickled `Make`. meeting: None: another process applies the gradients. state: of the
        learner.
        """
        with self._failing() as failed:
            make_parts: Make = pickle.loads(make)
            if meeting is not None:
                store, device = store_at(meeting.host, meeting.port), torch.device(meeting.device)
                self._ranks = TorchRanks(store, index, count, device=device)
            place = Place(
                index=index, count=count, ranks=self._ranks, stops_early=self._stops_early
            )
            made = self._made = make_parts(place)
            self._models = nn.ModuleDict(self._step.algo.models)
            load(self._step, state)
            self._publish(self._step.version)
            made.source.start(self._supervisor)
            self._supervisor.on_close(made.source.close)
            self._batches = iter(made.source.batches())
        return failed.result

    def collect(
        self, number: int, counters: Mapping[str, int], weights: Weights | None
    ) -> Collected | Failed | None:
        """Takes the next batch, with newer weights if any; None: the source has ended.

        number: of the round, for `stop_early`. counters: of the run, at the weights that the worker
        then has, newer ones or not.
        """
        with self._failing() as failed:
            self._load(counters, weights)
            self._publish(counters["version"])
            return self._collect(number)
        return failed.result

    def contribute(
        self, counters: Mapping[str, int], weights: Weights | None
    ) -> Contributed | Finished | Failed:
        """Returns the gradients of the batch's next minibatch, with newer weights if any."""
        with self._failing() as failed:
            self._load(counters, weights)
            return self._next_contribution() or Finished()
        return failed.result

    def update(self, trained: tuple[bool, ...]) -> Updated | NotFinite | Failed:
        """Learns from the batch, together with the other ranks; trained: as in Weights."""
        with self._failing() as failed:
            self._freeze(trained)
            try:
                with own_settings():
                    figures = self._step.update(self._batch).figures
            except NonFiniteError as error:
                return NotFinite(str(error))
            return Updated(figures, self._step.counters.state_dict())
        return failed.result

    def step(
        self, counters: Mapping[str, int], weights: Weights | None, goes_on: bool
    ) -> Begun | Contributed | Finished | Failed | None:
        """Returns the gradients of the next minibatch with newer weights if any; Finished, once,
        after the last one of a batch; None: the source has ended.

        goes_on: with the same batch; otherwise the rest of it is left out.
        """
        with self._failing() as failed:
            self._load(counters, weights)
            if goes_on:
                return self._next_contribution() or Finished()
            self._publish(counters["version"])
            if (collected := self._collect(self._round + 1)) is None:
                return None
            contributed = self._next_contribution()
            assert contributed is not None  # minibatches() yields at least one
            return Begun(collected, contributed)
        return failed.result

    def state(self) -> bytes | Failed:
        """Returns the state of the learner."""
        with self._failing() as failed:
            return saved(self._step)
        return failed.result

    def load(self, state: bytes) -> Failed | None:
        """Restores the state of the learner."""
        with self._failing() as failed:
            load(self._step, state)
        return failed.result

    def stop_early(self, number: int, fraction: float) -> None:
        """Ends the collection in this round, once the batch has this share of its steps."""
        self._least, self._stopped_round = fraction, number

    def end(self) -> None:
        """Ends the source, and with it every wait for a batch."""
        self._supervisor.stop("the run ended")

    def close(self) -> None:
        """Ends what the source has started."""
        if self._made is not None:
            self._made.end()

    @property
    def _parts(self) -> Made:
        assert self._made is not None  # `start` was called
        return self._made

    @property
    def _step(self) -> OptimiserStep[Any]:
        return self._parts.optimiser_step

    def _stops_early(self, share: float) -> bool:
        return self._stopped_round == self._round and share >= self._least

    def _collect(self, number: int) -> Collected | None:
        self._round = number
        taken = next(self._batches, None)
        if taken is None:
            if self._supervisor.failure is not None:
                raise self._supervisor.failure.error
            return None
        device = self._parts.device
        self._batch = batch = taken.map(lambda leaf: leaf.to(device))
        observed: list[Moments] = []
        if self._ranks is None:
            with own_settings():
                observed = self._step.statistics.observed(batch)
            self._minibatches = self._contributions(batch)
        return Collected(
            env_steps=batch.env_steps,
            lags=taken.lags(self._version),
            version=self._version,
            episodes=taken.finished_episodes(),
            info=taken.finished_info(),
            observed=[[part.cpu().numpy() for part in moments] for moments in observed],
            status=dict(self._parts.source.status()),
            seconds=self._parts.source.seconds(),
        )

    def _next_contribution(self) -> Contributed | None:
        with own_settings():
            return next(self._minibatches, None)

    def _contributions(self, batch: Any) -> Iterator[Contributed]:
        begun = self._step.begin(batch)
        metrics = divided(begun.metrics)
        for number, minibatch in enumerate(begun.minibatches):
            env_steps = 0 if number else batch.env_steps
            message, gradients = self._step.contribution(minibatch, number, env_steps)
            steps = self._step.counters.optimiser_steps
            yield Contributed(message, gradients.cpu().numpy(), steps, metrics)
            metrics = {}

    def _load(self, counters: Mapping[str, int], weights: Weights | None) -> None:
        if self._ranks is None:  # else this worker counts its steps itself
            self._step.counters.load_state_dict(counters)
        if weights is not None:
            self._models.load_state_dict(unpacked(weights.packed, self._models))
            self._freeze(weights.trained)

    def _freeze(self, trained: tuple[bool, ...]) -> None:
        for parameter, is_trained in zip(self._models.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)

    def _publish(self, version: int) -> None:
        self._version = version
        self._parts.publish(self._step.algo.actor, version)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[_Outcome]:
        """Keeps an exception of the body as the result."""
        outcome = _Outcome()
        try:
            yield outcome
        except RankGone as error:
            outcome.result = Failed(str(error), usage=False, is_consequence=True)
        except Exception as error:
            self._leave(error)
            report = failure(error)
            outcome.result = Failed(report["error"], report["usage"])

    def _leave(self, error: Exception) -> None:
        if self._ranks is not None:
            self._ranks.leave(str(error).strip().splitlines()[-1] if str(error) else repr(error))


class _Outcome:
    result: Failed | None = None


def as_tensor(array: np.ndarray) -> Tensor:
    """Returns an array that was sent; a copy if it is read-only, as in the memory of Ray."""
    return torch.from_numpy(np.require(array, requirements="W"))


def weights_of(step: OptimiserStep[Any], trained: tuple[bool, ...]) -> Weights:
    """Returns a copy of the weights of a learner; trained: as in Weights."""
    return Weights(packed(nn.ModuleDict(step.algo.models)), trained)


def saved(step: OptimiserStep[Any]) -> bytes:
    """Returns the state of a learner."""
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    return file.getvalue()


def load(step: OptimiserStep[Any], state: bytes) -> None:
    """Restores the result of `saved`."""
    step.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu"))
