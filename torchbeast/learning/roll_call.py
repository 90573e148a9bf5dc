# SPDX-License-Identifier: Apache-2.0
"""The batches of several learners that learn as one, agreed on in roll calls.

    rank 0   source --> a batch is there --+                                     +--> update --> ...
    rank 1   source --> not yet -----------+-- roll call: all ready, or a stop --+--> update --> ...

Before each update every rank reports whether its batch is there, and whether it ends the run. They
learn when all are ready, and they end after the same update when one ends. A rank that waits for
its batch answers every second, so a roll call lasts no longer, and a rank that does not answer is
lost. The reports also carry what the log and the display show of all ranks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchbeast.core.algos.base import Algorithm, Counters
from torchbeast.core.algos.optimiser_step import Learnt
from torchbeast.core.algos.torch_ranks import RankGone
from torchbeast.core.envs.contract import joined_info
from torchbeast.core.storages.batch import Batch, Feedback
from torchbeast.errors import RunError
from torchbeast.learning.training import DONE, Updates
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.contract import WAIT_S, Away, Shortage, Source
from torchbeast.sources.taking import Taking

PATIENCE_S = 1.0
"""Seconds that a rank waits for its batch before it answers that it has none yet."""

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


class Report(NamedTuple):
    """One rank's answer in a roll call; JSON as a dict."""

    ready: bool  # its batch is there
    stop: str  # why it ends the run; "" if it goes on
    status: Mapping[str, float]  # of its source
    seconds: Mapping[str, float]  # of its source, since the start
    away: Sequence[Sequence[Any]]  # its lost streams, as of Away
    hanging: str  # of its source
    # Of its batch, if that is there:
    env_steps: int = 0
    lags: Mapping[str, float] = {}
    episodes: Sequence[Sequence[Any]] = ((), ())  # returns and lengths
    info: Mapping[str, list[float]] = {}


@dataclass(frozen=True)
class JointBatch:
    """This rank's batch, with what all ranks have reported of theirs."""

    own: Batch
    reports: Sequence[Report]  # in the order of ranks

    @property
    def batch_size(self) -> int:
        """Number of this rank's columns."""
        return self.own.batch_size

    @property
    def column_bytes(self) -> int:
        """Bytes of observations per column."""
        return self.own.column_bytes

    @property
    def num_steps(self) -> int:
        """Number of this rank's steps to learn from."""
        return self.own.num_steps

    @property
    def env_steps(self) -> int:
        """Number of newly collected steps of all ranks."""
        return sum(report.env_steps for report in self.reports)

    def new_observations(self) -> Any:
        """Returns this rank's observations."""
        return self.own.new_observations()

    def lags(self, version: int) -> dict[str, float]:
        """Returns the lags behind the version of the roll call, which is that of the next update:
        the mean over all steps, and the largest.
        """
        found = [(report.lags, report.env_steps) for report in self.reports if report.lags]
        if not found:
            return {}
        steps = sum(count for _, count in found)
        total = sum(lags["mean_lag"] * count for lags, count in found)
        largest = max(lags["max_lag"] for lags, _ in found)
        return {"mean_lag": total / steps if steps else math.nan, "max_lag": largest}

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns returns and lengths of the finished games of all ranks."""
        episodes = [report.episodes for report in self.reports]
        return [r for returns, _ in episodes for r in returns], [
            n for _, lengths in episodes for n in lengths
        ]

    def finished_info(self) -> dict[str, list[float]]:
        """Returns numbers of the info of these games by keyword."""
        return joined_info([report.info for report in self.reports])

    def map(self, function: Callable[[Tensor], Tensor]) -> JointBatch:
        """Returns a batch with function(tensor) in place of every tensor."""
        return JointBatch(self.own.map(function), self.reports)

    def hand_back(self, feedback: Feedback) -> None:
        """Does nothing: several learners have no replay."""

    def split(self, max_columns: int) -> Sequence[JointBatch]:
        """Returns the batch: `JointUpdates` divides this rank's."""
        return [self]


class JointUpdates:
    """The update of one of several learners, from its JointBatch."""

    def __init__(self, step: Updates, supervisor: Supervisor) -> None:
        """step: joins its gradients with the other ranks."""
        self._step, self._supervisor = step, supervisor

    @property
    def algo(self) -> Algorithm[Any]:
        """The algorithm."""
        return self._step.algo

    @property
    def counters(self) -> Counters:
        """Counts of all ranks together, from the start of the run, across restarts."""
        return self._step.counters

    @property
    def version(self) -> int:
        """Version of the weights: number of updates, across restarts."""
        return self._step.version

    def update(self, batch: JointBatch) -> Learnt:
        """Learns from the batches of all ranks."""
        try:
            return self._step.update(batch.own)
        except RankGone as error:
            self._supervisor.fail_at_end("", error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the next update depends on; tensors are shared, not copied."""
        return self._step.state_dict()


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


class JointSource:
    """Yields a rank's batches, each once all ranks have one, until one of them ends the run.

    One thread iterates over `batches`, and the same thread updates: it takes part in every roll
    call and update. Whatever it waits for ends: a roll call by the time limit of `gather`, the
    source by the supervisor.
    """

    def __init__(
        self,
        source: Source,
        gather: Gather,
        rank: int,
        step: _Versioned,
    ) -> None:
        """gather: returns the reports of all ranks; raises RankGone. step: of this rank."""
        self._source, self._gather, self._rank, self._step = source, gather, rank, step
        self._taking, self._number = Taking(source.batches), 0  # of the last batch asked for
        self._ready_since: float | None = None  # this rank's batch is there
        self._others: Sequence[tuple[int, Report]] = ()  # with their ranks, in the last roll call

    @property
    def yields(self) -> type:
        """The class of its batches."""
        return JointBatch

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that this rank's source and its batches take."""
        return self._source.num_bytes

    def start(self, supervisor: Supervisor) -> None:
        """Starts this rank's source."""
        self._supervisor = supervisor
        self._source.start(supervisor)
        supervisor.on_close(self.close)
        supervisor.start_thread("batches", self._taking.run)

    def close(self) -> None:
        """Ends the wait for a batch; the source ends its own. May be called again."""
        self._taking.close()

    def batches(self) -> Iterator[JointBatch]:
        """Yields batches until a rank ends the run; ask for the next one after the update."""
        try:
            while (batch := self._next()) is not None:
                yield batch
        except RankGone as error:
            # At the end too: where one rank is killed, torchrun stops the others by a signal.
            self._supervisor.fail_at_end("", error)

    def status(self) -> Mapping[str, float]:
        """Returns queue lengths and counts of all ranks together."""
        return _total([self._source.status(), *(report.status for _, report in self._others)])

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the sources of all ranks have spent, by stage."""
        return _total([self._source.seconds(), *(report.seconds for _, report in self._others)])

    def hanging(self) -> str:
        """Describes what hangs in any rank; "" if nothing does."""
        others = [f"rank {rank}: {r.hanging}" for rank, r in self._others if r.hanging]
        return "; ".join(filter(None, [self._source.hanging(), *others, self._late()]))

    def _late(self) -> str:
        """Names the ranks for which this one has waited for long; "" if there are none."""
        late = [str(rank) for rank, report in self._others if not report.ready]
        since = self._ready_since
        if since is None or not late or time.monotonic() - since < WAIT_S:
            return ""
        return f"the other learners of the run wait for a batch of rank {', '.join(late)}"

    def away(self) -> list[Away]:
        """Returns the lost streams of all ranks."""
        own = [_of_rank(self._rank, stream) for stream in self._source.away()]
        return own + [_of_rank(rank, s) for rank, report in self._others for s in report.away]

    def _next(self) -> JointBatch | None:
        """Calls the roll until all ranks are ready; None: the run ends."""
        self._number += 1
        self._taking.ask(self._number)
        own: Batch | None = None
        self._ready_since = None
        while self._supervisor.failure is None:  # else this rank leaves, which the others notice
            if own is None:
                own = self._taking.wait(self._number, PATIENCE_S)
                self._ready_since = None if own is None else time.monotonic()
            reports = self._call(own)
            if any(report.stop for report in reports):
                self._stop(reports)
                return None
            if own is not None and all(report.ready for report in reports):
                return JointBatch(own, reports)
        return None

    def _call(self, own: Batch | None) -> list[Report]:
        """Takes part in a roll call; returns the reports in the order of ranks."""
        said = self._gather(self._report(own)._asdict())
        reports = [_read(rank, message) for rank, message in enumerate(said)]
        self._others = [each for each in enumerate(reports) if each[0] != self._rank]
        return reports

    def _report(self, own: Batch | None) -> Report:
        report = Report(
            ready=own is not None,
            stop=self._supervisor.reason or "",
            status=dict(self._source.status()),
            seconds=self._source.seconds(),
            away=[[*stream] for stream in self._source.away()],
            hanging=self._source.hanging(),
        )
        if own is None:
            return report
        return report._replace(
            env_steps=own.env_steps,
            lags=own.lags(self._step.version),
            episodes=own.finished_episodes(),
            info=own.finished_info(),
        )

    def _stop(self, reports: Sequence[Report]) -> None:
        """Ends the run here as in the first rank that ends it."""
        rank, reason = next((rank, r.stop) for rank, r in enumerate(reports) if r.stop)
        if not self._supervisor.ended and reason != DONE:
            print(f"Stopped by {reason} in rank {rank}.", flush=True)
        self._supervisor.stop(f"{reason} in rank {rank}")


def _read(rank: int, said: Mapping[str, Any]) -> Report:
    """Reads the report of a rank; raises RunError for what is none."""
    try:
        return Report(**said)
    except TypeError as error:
        raise RunError(
            f"rank {rank} answers the roll call in words that this one does not know ({error}): "
            "start all learners with the same version of TorchBeast"
        ) from None


def _of_rank(rank: int, away: Sequence[Any]) -> Away:
    """Returns a lost stream of a rank; away: as of Away, possibly from JSON."""
    where, seconds, short, why = away
    short = short and Shortage(*short)._replace(of=f" of rank {rank}")
    return Away(where, seconds, short, why)


def _total(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sum of each figure."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
