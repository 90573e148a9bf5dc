# SPDX-License-Identifier: Apache-2.0
"""What a run tells while it trains: warnings if it is stuck, and in programs the display."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchbeast.fleets.system import core_time
from torchbeast.fleets.waiting import running_time, say, warn
from torchbeast.reporting import diagnosis
from torchbeast.reporting.display import Display, Shown
from torchbeast.reporting.prometheus import PrometheusEndpoint, learner_metrics
from torchbeast.run.plan import Plan
from torchbeast.run.training import Training

_LOOK_S = 1.0  # between two looks at what the learner waits for
_SHOW_EVERY_S = 1.0
_LEAST_S, _LEAST_UPDATES = 20.0, 20  # of learning, to name the bottleneck at the end
_LAST_UPDATE_S = 2.0  # longest time that the last frame waits for an update to end


def start_watchdog(training: Training, batch_size: int) -> None:
    """Starts a thread that warns while the loop is stuck, until the run ends.

    It only reads clocks and counts. batch_size: rollouts in a batch of all learners.
    """
    ended, supervisor = threading.Event(), training.supervisor
    supervisor.on_close(ended.set)
    supervisor.start_thread("watchdog", lambda: _watch(training, batch_size, ended))


def _watch(training: Training, batch_size: int, ended: threading.Event) -> None:
    watchdog, source = diagnosis.Watchdog(running_time(), batch_size), training.source
    while not ended.wait(_LOOK_S):
        now, files = running_time(), training.waits_for_files()
        if training.rows.clock.is_pausing:  # an evaluation says itself what it waits for
            watchdog.restart(now)
            continue
        stall = watchdog.check(training.rows.count, source.status(), now, source.hanging(), files)
        if stall:
            warn(stall, is_logged=not files)


@dataclass(frozen=True, kw_only=True)
class RunDisplay:
    """Shows a program's run on the terminal and to Prometheus, from the main thread."""

    plan: Plan
    training: Training
    prometheus: PrometheusEndpoint = field(default_factory=PrometheusEndpoint)

    def until_the_end(self) -> None:
        """Shows the run every second, until the supervisor ends it."""
        plan, supervisor = self.plan, self.training.supervisor
        window, first, status = diagnosis.RecentShares(), None, self.training.source.status()
        only_warnings = plan.display.suppress_logs
        title = f"{plan.env.name}, {plan.run.xpid}"
        with Display(title, only_warnings=only_warnings) as display:
            while not supervisor.wait(_SHOW_EVERY_S):
                status = self.training.source.status()
                last = self._show(display, status, window)
                first = first or (last if self.training.rows.count else None)
            supervisor.join(_LAST_UPDATE_S)
            if self.training.rows.count:
                self._show(display, status, window, self.training.rows.seconds)
        is_whole = supervisor.failure is None and not self.training.source.lost_streams()
        if first is not None and is_whole and not only_warnings:
            self._say_bottleneck(first, last)

    def _say_bottleneck(self, first: diagnosis.Reading, last: diagnosis.Reading) -> None:
        """Names the bottleneck of the run.

        first, last: readings after its first update, and before the end of its processes.
        """
        rows = self.training.rows
        bottleneck = self._diagnose(diagnosis.shares(last, first))
        is_long = last.time - first.time >= _LEAST_S
        if bottleneck is not None and is_long and rows.count >= _LEAST_UPDATES:
            advice_below = bottleneck.sentence.replace(": ", ":\n  ")  # lines fit a terminal
            say(f"Overall: {advice_below}.")

    def _diagnose(self, shares: diagnosis.Shares) -> diagnosis.Diagnosis | None:
        lag = self.training.rows.newest.get("mean_lag", math.nan)
        if self.plan.learner.trains_on_any_age:
            lag = math.nan
        return diagnosis.diagnose(shares, self.plan.collection, lag)

    def _reading(self) -> diagnosis.Reading:
        """Returns the time of stages and processes until now."""
        reading, cores = self.training.rows.reading(), core_time()
        stages = dict(reading.seconds)
        if (of_workers := stages.pop("computing", None)) is not None:
            cores = cores._replace(own=time.process_time() + of_workers, delayed=0.0)
        return reading._replace(seconds=stages, cores=cores)

    def _show(
        self,
        display: Display,
        status: Mapping[str, float],
        window: diagnosis.RecentShares,
        took: float = math.nan,
    ) -> diagnosis.Reading:
        training, rows, writer = self.training, self.training.rows, self.training.writer
        reading, lost_streams = self._reading(), training.source.lost_streams()
        recent = window.add(reading) if rows.count else diagnosis.UNKNOWN
        _, live = diagnosis.alive(status)
        advice = self._diagnose(recent) if live else None
        shown = Shown(
            progress=replace(rows.progress),  # a copy: learner threads change it
            total_steps=self.plan.learner.total_steps,
            status=status,
            lost_streams=lost_streams,
            shares=recent,
            diagnosis=diagnosis.diagnose_lost_streams(lost_streams, live) or advice,
            run=self.plan.run.xpid,
            updates=training.updates,
            stage_seconds=reading.seconds,
            row=dict(rows.newest),  # a copy: callbacks add to it
            saved_at=writer.saved_at,
            failed_saves=writer.failed,
            learnt_here=rows.steps_here,
            took=took,
        )
        display.show(shown)
        self.prometheus.show(learner_metrics(shown))
        return reading
