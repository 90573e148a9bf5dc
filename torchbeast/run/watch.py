# SPDX-License-Identifier: Apache-2.0
"""The main thread of a run: shows progress, saves periodically, and warns if the run is stuck."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchbeast.fleets.waiting import running_time, say, warn
from torchbeast.reporting.diagnosis import (
    UNKNOWN,
    Reading,
    RecentShares,
    Watchdog,
    alive,
    diagnose,
    diagnose_lost_streams,
    shares,
)
from torchbeast.reporting.display import Display, Shown
from torchbeast.reporting.prometheus import PrometheusEndpoint, learner_metrics
from torchbeast.run.checkpoint_writer import CheckpointNotWritten, CheckpointWriter
from torchbeast.run.config import FIRST_CHECKPOINT_S
from torchbeast.run.training import NoMoment, Training

if TYPE_CHECKING:
    from torchbeast.run.learner_run import LearnerRun

_SHOW_EVERY_S = 1.0
_LEAST_S, _LEAST_UPDATES = 20.0, 20  # of learning, to name the bottleneck at the end
_LAST_UPDATE_S = 2.0  # longest time that the last frame waits for an update to end
_MOMENT_S = 10.0  # longest time that a periodic checkpoint may block the display


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Watches a run: its display, checkpoints and warnings."""

    run: LearnerRun
    training: Training
    checkpoint_writer: CheckpointWriter
    prometheus: PrometheusEndpoint = field(default_factory=PrometheusEndpoint)

    def until_the_end(self) -> None:
        """Watches until the supervisor ends the run."""
        plan, supervisor = self.run.plan, self.training.supervisor
        watchdog = Watchdog(running_time(), self.run.rollouts_at_once)
        window, first, status = RecentShares(), None, self.training.source.status()
        save_every_s = plan.checkpoints.checkpoint_interval
        save_at = running_time() + min(FIRST_CHECKPOINT_S, save_every_s)
        only_warnings = plan.display.suppress_logs
        title = f"{self.run.plan.env.name}, {plan.run.xpid}"
        with Display(title, only_warnings=only_warnings) as display:
            while not supervisor.wait(_SHOW_EVERY_S):
                status, now = self.training.source.status(), running_time()
                self._show(display, status, window)
                updates, hanging = self.training.updates_here, self.training.source.hanging()
                first = first or (self.training.reading() if updates else None)
                files = self.training.waits_for_files()
                if self.training.is_in_callback:  # an evaluation says itself what it waits for
                    watchdog.restart(now)
                if stall := watchdog.check(updates, status, now, hanging, files):
                    warn(stall, is_logged=not files)
                # After the end of the run, its last checkpoint is written immediately.
                is_due = now >= save_at and updates and not supervisor.ended
                if is_due and self._save_if_possible():
                    save_at = running_time() + save_every_s
            supervisor.join(_LAST_UPDATE_S)
            if self.training.updates_here:
                self._show(display, status, window, self.training.seconds)
        is_whole = supervisor.failure is None and not self.training.source.lost_streams()
        if first is not None and is_whole and not only_warnings:
            self._say_bottleneck(first)

    def _say_bottleneck(self, first: Reading) -> None:
        """Names the bottleneck of the run; first: a reading after its first update."""
        last = self.training.reading()
        found = diagnose(shares(last, first), self.run.plan.collection)
        is_long = last.time - first.time >= _LEAST_S
        if found is not None and is_long and self.training.updates_here >= _LEAST_UPDATES:
            say(f"Overall: {found.sentence}.")

    def _show(
        self,
        display: Display,
        status: Mapping[str, float],
        window: RecentShares,
        took: float = math.nan,
    ) -> None:
        has_learnt = self.training.updates_here > 0
        recent = window.add(self.training.reading()) if has_learnt else UNKNOWN
        lost_streams = self.training.source.lost_streams()
        _, live = alive(status)
        advice = diagnose(recent, self.run.plan.collection) if live else None
        shown = Shown(
            progress=replace(self.training.progress),  # a copy: learner threads change it
            total_steps=self.training.total_steps,
            status=status,
            lost_streams=lost_streams,
            shares=recent,
            diagnosis=diagnose_lost_streams(lost_streams, live) or advice,
            run=self.run.plan.run.xpid,
            updates=self.training.updates,
            stage_seconds=self.training.reading().seconds,
            row=self.training.metrics,
            saved_at=self.checkpoint_writer.saved_at,
            failed_saves=self.checkpoint_writer.failed,
            learnt_here=self.training.steps_here,
            took=took,
        )
        display.show(shown)
        self.prometheus.show(learner_metrics(shown))

    def _save_if_possible(self) -> bool:
        """Saves. A failure is only a warning, because a full disk may have room again next time.

        Returns False during a long update, so that it is tried again a second later.
        """
        try:
            self.checkpoint_writer.save(self.training, _MOMENT_S)
        except NoMoment:  # the watchdog warns if an update takes a minute
            return False
        except CheckpointNotWritten as error:
            warn(f"{error}; the run continues")
        return True
