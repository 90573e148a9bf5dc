# SPDX-License-Identifier: Apache-2.0
"""Roll calls, in which data-parallel learners agree on their next batches.

    rank 0   source --> a batch is there --+                                     +--> update --> ...
    rank 1   source --> not yet -----------+-- roll call: all ready, or a stop --+--> update --> ...

Before each update every rank reports whether its batch is ready, and whether it wants to end the
run. If all are ready, all update. If one ends, all end after the same update. A rank that waits for
its batch answers every second, so a roll call takes about a second at most, and a rank that does
not answer is lost. The reports also contain what the log and the display show about all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchbeast.collect.contract import WAIT_S, Away, BatchTaker, Shortage, Source
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.optimiser_step import Learnt, OptimiserStep
from torchbeast.core.update.torch_ranks import RankGone
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.gradients.joint import JointBatch, JointLearner, Report, report_of, total
from torchbeast.run.training import DONE

PATIENCE_S = 1.0
"""Seconds that a rank waits for its batch before it answers that the batch is not ready."""

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


class RankedLearner(JointLearner):
    """Yields a rank's batches, each when all ranks have one, and updates with all ranks.

    The same thread iterates over `batches` and updates, so it takes part in every roll call and in
    every update. All of its waits end: a roll call by the time limit of `gather`, the source by the
    supervisor.
    """

    def __init__(self, source: Source, gather: Gather, rank: int, step: OptimiserStep[Any]) -> None:
        """gather: returns the messages of all ranks; raises RankGone. step: joins its gradients
        with the other ranks.
        """
        super().__init__(step)
        self._source, self._gather, self._rank = source, gather, rank
        self.num_bytes = source.num_bytes
        self._taking, self._number = BatchTaker(source.batches), 0  # number of the last batch
        self._ready_since: float | None = None  # since when this rank has its batch
        self._others: Sequence[tuple[int, Report]] = ()  # with their ranks, in the last roll call

    def start(self, supervisor: Supervisor) -> None:
        """Starts this rank's source."""
        self._supervisor = supervisor
        self._source.start(supervisor)
        supervisor.on_close(self.close)
        supervisor.start_thread("batches", self._taking.run)

    def close(self) -> None:
        """Ends the wait for a batch here, but not in the source. May be called again."""
        self._taking.close()

    def batches(self) -> Iterator[JointBatch]:
        """Yields batches until a rank ends the run. Update before you ask for the next batch."""
        try:
            while (batch := self._next()) is not None:
                yield batch
        except RankGone as error:
            # Even at the end: if a rank is killed, torchrun stops the others by a signal.
            self._supervisor.fail_at_end("", error)

    def update(self, batch: JointBatch) -> Learnt:
        """Updates with the batches of all ranks."""
        try:
            return self._step.update(batch.own)
        except RankGone as error:
            self._supervisor.fail_at_end("", error)
            raise

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives the environments of this rank options."""
        self._source.set_env_options(options)

    def status(self) -> Mapping[str, float]:
        """Returns queue lengths and counts of all ranks together."""
        return total([self._source.status(), *(report.status for _, report in self._others)])

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the sources of all ranks have spent, by stage."""
        return total([self._source.seconds(), *(report.seconds for _, report in self._others)])

    def hanging(self) -> str:
        """Describes workers and ranks that hang, or returns ""."""
        others = [f"rank {rank}: {r.hanging}" for rank, r in self._others if r.hanging]
        return "; ".join(filter(None, [self._source.hanging(), *others, self._late()]))

    def _late(self) -> str:
        """Names the ranks that have kept this one waiting for over WAIT_S, or returns ""."""
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
        """Holds roll calls until all ranks are ready; returns None if the run ends."""
        self._number += 1
        self._taking.ask(self._number)
        own: Batch | None = None
        self._ready_since = None
        while self._supervisor.failure is None:  # else it leaves, and the others notice
            if own is None:
                own = self._taking.wait(self._number, PATIENCE_S)
                self._ready_since = None if own is None else time.monotonic()
            reports = self._call(own)
            if any(report.stop for report in reports):
                self._stop(reports)
                return None
            if all(report.ready for report in reports):
                return JointBatch(reports, own)
        return None

    def _call(self, own: Batch | None) -> list[Report]:
        """Takes part in a roll call; returns the reports in the order of ranks."""
        report = report_of(self._source, own, self.version)._replace(
            stop=self._supervisor.reason or "",
            away=[[*stream] for stream in self._source.away()],
            hanging=self._source.hanging(),
        )
        said = self._gather(report._asdict())
        reports = [_read(rank, message) for rank, message in enumerate(said)]
        self._others = [each for each in enumerate(reports) if each[0] != self._rank]
        return reports

    def _stop(self, reports: Sequence[Report]) -> None:
        """Ends the run with the reason of the first rank that ends it."""
        rank, reason = next((rank, r.stop) for rank, r in enumerate(reports) if r.stop)
        if not self._supervisor.ended and reason != DONE:
            print(f"Stopped by {reason} in rank {rank}.", flush=True)
        self._supervisor.stop(f"{reason} in rank {rank}")


def _read(rank: int, said: Mapping[str, Any]) -> Report:
    """Reads the report of a rank; raises RunError if it is not valid."""
    try:
        return Report(**said)
    except TypeError as error:
        raise RunError(
            f"rank {rank} sent a roll-call answer that this one does not understand ({error}): "
            "start all learners with the same version of TorchBeast"
        ) from None


def _of_rank(rank: int, away: Sequence[Any]) -> Away:
    """Returns a lost stream of a rank; away: the fields of Away, possibly from JSON."""
    where, seconds, short, why = away
    short = short and Shortage(*short)._replace(of=f" of rank {rank}")
    return Away(where, seconds, short, why)
