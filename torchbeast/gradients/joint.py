# SPDX-License-Identifier: Apache-2.0
"""Several learners that learn as one: what they report of their batches, and the batch of a joint
update.

    learner 0   source --> a batch --> Report --+
    learner 1   source --> a batch --> Report --+--> JointBatch --> an update from all batches

The learners are the ranks that torchrun starts (`run/roll_call.py`), or gradient workers
(`gradients/workers.py`). A JointLearner is both the source and the update of a training
loop.
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
from torchbeast.core.update.optimiser_step import Learnt, OptimiserStep


class Report(NamedTuple):
    """A learner's report of its source and of its batch; JSON as a dict, but for `observed`."""

    status: Mapping[str, float]  # of its source
    seconds: Mapping[str, float]  # of its source, since the start
    ready: bool = False  # its batch is there, and the next five are of this batch:
    env_steps: int = 0
    version: int = 0  # of the newest weights that the learner had
    lags: Mapping[str, float] = {}  # behind this version
    episodes: Sequence[Sequence[Any]] = ((), ())  # returns and lengths
    info: Mapping[str, list[float]] = {}  # of these episodes, by keyword
    observed: Any = ()  # of a gradient worker: what the batch adds to the running statistics
    stop: str = ""  # of a rank: why it ends the run; "" if it goes on
    away: Sequence[Sequence[Any]] = ()  # of a rank: its lost streams, as of Away
    hanging: str = ""  # of a rank's source


def report_of(source: Source, batch: Batch | None, version: int) -> Report:
    """Returns a report; batch: None while there is none. version: of the learner's weights."""
    report = Report(dict(source.status()), source.seconds())
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

    reports: in the order of learners. An asynchronous update adds its only one.
    own: the batch of this process, if it has one.
    """

    reports: list[Report] = field(default_factory=list)
    own: Batch | None = None

    @property
    def env_steps(self) -> int:
        """Number of newly collected steps of all learners."""
        return sum(report.env_steps for report in self.reports)

    def lags(self, version: int) -> dict[str, float]:
        """Returns the lags behind this version: the mean over all steps, and the largest."""
        found = [(each, version - each.version) for each in self.reports if each.lags]
        if not found:
            return {}
        steps = sum(each.env_steps for each, _ in found)
        total = sum(each.env_steps * (each.lags["mean_lag"] + more) for each, more in found)
        largest = max(each.lags["max_lag"] + more for each, more in found)
        return {"mean_lag": total / steps if steps else math.nan, "max_lag": largest}

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of the finished games of all learners."""
        returns = [r for each in self.reports for r in each.episodes[0]]
        return returns, [n for each in self.reports for n in each.episodes[1]]

    def finished_info(self) -> dict[str, list[float]]:
        """Returns the numbers of the info of these games, by keyword."""
        return joined_info([each.info for each in self.reports])

    def map(self, function: Callable[[Tensor], Tensor]) -> JointBatch:
        """Returns the batch with function(tensor) in place of every tensor of this process."""
        return self if self.own is None else replace(self, own=self.own.map(function))

    def hand_back(self, feedback: Feedback) -> None:
        """Does nothing: several learners have no replay."""


class JointLearner(ABC):
    """The common base of those that make several learners one.

    A training loop uses it as its source and as its OptimiserStep.
    """

    yields = JointBatch

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
    def update(self, batch: JointBatch) -> Learnt:
        """Learns from the batches of all learners, see OptimiserStep."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next update depends on; tensors are shared, not copied."""
        return self._step.state_dict()


def total(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sum of each figure."""
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part)
    return dict(found)


def saved(step: OptimiserStep[Any]) -> bytes:
    """Returns the state of a learner."""
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    return file.getvalue()


def load(step: OptimiserStep[Any], state: bytes) -> None:
    """Restores the result of `saved`."""
    step.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
