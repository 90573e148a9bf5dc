# SPDX-License-Identifier: Apache-2.0
"""The common parts of data-parallel learners: reports about their batches, and joint updates.

    learner 0   source --> a batch --> BatchReport --+
    learner 1   source --> a batch --> BatchReport --+--> JointBatch --> an update from all batches

The learners are the ranks that torchrun starts (`run/replicas.py`), or gradient workers
(`gradients/workers.py`). To a training loop, a JointLearner is both the source and the update.
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchbeast.collect.contract import Source
from torchbeast.core.algos.base import Algorithm, Counters
from torchbeast.core.envs.contract import joined_info
from torchbeast.core.storages.batch import Batch, Feedback
from torchbeast.core.update.optimiser_step import OptimiserStep, UpdateResult


class BatchReport(NamedTuple):
    """A learner's report about its source and batch. As a dict it is JSON."""

    status: Mapping[str, float]  # of its source
    seconds: Mapping[str, float]  # of its source, since the start
    ready: bool = False  # whether it has a batch; the next five fields describe it:
    env_steps: int = 0
    version: int = 0  # version of the learner's weights
    lags: Mapping[str, float] = {}  # policy lags behind this version
    episodes: Sequence[Sequence[Any]] = ((), ())  # returns and lengths
    info: Mapping[str, list[float]] = {}  # of these episodes, by keyword
    observed: Any = ()  # of a gradient worker: the contribution to running statistics
    stop: str = ""  # of a rank: why it ends the run; "": it continues
    away: Sequence[Sequence[Any]] = ()  # of a rank: its lost streams, fields of LostStream
    hanging: str = ""  # of a rank: `hanging` of its source
    env_options: Mapping[str, Any] | None = None  # of rank 0: what all environments were given last


def report_of(source: Source, batch: Batch | None, version: int) -> BatchReport:
    """Returns a report; batch: None if it is not ready. version: of the learner's weights."""
    report = BatchReport(dict(source.status()), source.seconds())
    if batch is None:
        return report
    return report._replace(
        ready=True,
        env_steps=batch.env_steps,
        version=version,
        lags=batch.lags(version),
        episodes=batch.finished_episodes(),
        info=batch.finished_info(),
    )


@dataclass(frozen=True)
class JointBatch:
    """The batches of several learners, as a training loop sees them.

    reports: in the order of learners. With asynchronous workers, the update adds a single report.
    own: the batch of this process, if it has one.
    """

    reports: list[BatchReport] = field(default_factory=list)
    own: Batch | None = None

    @property
    def env_steps(self) -> int:
        """Number of newly collected steps, over all learners."""
        return sum(report.env_steps for report in self.reports)

    def lags(self, version: int) -> dict[str, float]:
        """Returns the policy lags behind this version: the mean over all steps, and the largest."""
        with_lags = [(report, version - report.version) for report in self.reports if report.lags]
        if not with_lags:
            return {}
        steps = sum(report.env_steps for report, _ in with_lags)
        total = sum(r.env_steps * (r.lags["mean_lag"] + more) for r, more in with_lags)
        largest = max(report.lags["max_lag"] + more for report, more in with_lags)
        return {"mean_lag": total / steps if steps else math.nan, "max_lag": largest}

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of the finished episodes of all learners."""
        returns = [r for report in self.reports for r in report.episodes[0]]
        return returns, [n for report in self.reports for n in report.episodes[1]]

    def finished_info(self) -> dict[str, list[float]]:
        """Returns the numbers from the info of these episodes, by keyword."""
        return joined_info([report.info for report in self.reports])

    def map(self, function: Callable[[Tensor], Tensor]) -> JointBatch:
        """Returns the batch with function(tensor) in place of every tensor of this process."""
        return self if self.own is None else replace(self, own=self.own.map(function))

    def give_feedback(self, feedback: Feedback) -> None:
        """Does nothing, because several learners cannot have a replay."""


class JointLearner(ABC):
    """The base class for combining several learners.

    A training loop uses it both as its source and as its OptimiserStep.
    """

    def __init__(self, step: OptimiserStep[Any]) -> None:
        """step: of this process."""
        self._step = step
        self.algo: Algorithm[Any] = step.algo

    @property
    def counters(self) -> Counters:
        """Counts of all learners together, from the start of the run, across restarts."""
        return self._step.counters

    @property
    def version(self) -> int:
        """Version of the weights: number of updates, across restarts."""
        return self._step.version

    @abstractmethod
    def update(self, batch: JointBatch) -> UpdateResult:
        """Updates with the batches of all learners, see OptimiserStep."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next update depends on; tensors are shared, not copied."""
        return self._step.state_dict()


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sum of each metric."""
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


def saved_state(step: OptimiserStep[Any]) -> bytes:
    """Returns the state of a learner as bytes."""
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    return file.getvalue()


def load_state(step: OptimiserStep[Any], state: bytes) -> None:
    """Restores the result of `saved_state`."""
    step.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
