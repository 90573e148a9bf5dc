# SPDX-License-Identifier: Apache-2.0
"""The rows of logs.csv: the metrics of an update, the progress of the run, and where time goes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torchbeast.collect.contract import Source
from torchbeast.core.algos.base import Counters
from torchbeast.core.envs.tasks import TASK
from torchbeast.core.storages.batch import Batch
from torchbeast.reporting.diagnosis import Reading, spent
from torchbeast.reporting.display import Progress, Rate, mean
from torchbeast.reporting.loggers import Log

_log = logging.getLogger("torchbeast.learner")

Row = dict[str, float]
"""The metrics of an update, by the names of columns."""


class Stopwatch:
    """Measures blocks, in one thread at a time. Any thread may read it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # Seconds of the blocks that have ended, and the start of the running one.
        self._spent: tuple[float, float | None] = 0.0, None
        self.last = self.longest = 0.0  # seconds of blocks that have ended

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures the block."""
        spent, began = self._spent[0], self._now()
        self._spent = spent, began
        try:
            yield
        finally:
            self.last = self._now() - began
            self.longest = max(self.longest, self.last)
            self._spent = spent + self.last, None

    def read(self) -> tuple[float, float]:
        """Returns the seconds of all blocks up to now, and of the running one."""
        spent, began = self._spent
        running = 0.0 if began is None else self._now() - began
        return spent + running, running


class LearnerClock:
    """Splits wall-clock time into "learning" (during an update) and "waiting" (between updates).

    For any number of learner threads, the two and the time of callbacks add up to the time since
    the clock was made, because updates run one at a time. A running update counts up to now. Any
    thread may read it.

    Attributes:
        updates: Measures updates.
        pauses: Measures callbacks, which are neither.
        writing: Measures writing rows, which is a part of waiting.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._began = now, now()
        self.updates, self.pauses, self.writing = Stopwatch(now), Stopwatch(now), Stopwatch(now)
        self._is_in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Notes that a step of the loop runs."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    @property
    def is_pausing(self) -> bool:
        """Whether a callback runs, or no step, because a Learner's user does something else."""
        return self.pauses.read()[1] > 0 or not self._is_in_step

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent until now, by stage."""
        learning, pausing = self.updates.read()[0], self.pauses.read()[0]
        return {"learning": learning, "waiting": self._now() - self._began - learning - pausing}


class Rows:
    """Makes and writes the rows of a run, and keeps its progress up to date. One thread at a time
    uses it.

    Attributes:
        newest: The row of the last update.
        log: Gets each row.
        progress: Steps and episodes of the run.
        clock: Measures the stages of the learner.
        count: Number of rows, which is the number of updates of this process.
        seconds: From the start to the last update.
    """

    def __init__(
        self, source: Source, log: Log, progress: Progress, info_keywords: Sequence[str]
    ) -> None:
        """Starts the clock; info_keywords: numbers of episodes to log."""
        self.log, self.progress, self.clock = log, progress, LearnerClock()
        self.newest: Row = {}
        self.count, self.seconds = 0, 0.0
        self._source, self._info_keywords = source, info_keywords
        self._missed_info: set[str] = set()  # keywords that an episode lacked
        self._first_step, self._began = progress.step, time.monotonic()
        self._last = Reading(self._began, {})
        self._rate = Rate()
        self._rate.add(self._first_step, self._began)

    @property
    def steps_here(self) -> int:
        """Number of env steps that this process has trained on."""
        return self.progress.step - self._first_step

    def speed(self) -> float:
        """Returns the env steps per second since the start."""
        return self.steps_here / max(1e-9, time.monotonic() - self._began)

    def reading(self) -> Reading:
        """Returns the seconds spent on acting and learning until now, by stage."""
        seconds = self._source.seconds() | self.clock.seconds()
        return Reading(time.monotonic(), seconds, self.clock.writing.read()[0])

    def make(self, batch: Batch, metrics: Mapping[str, float], counters: Counters) -> Row:
        """Returns the row of an update, and adds it to the progress.

        batch: on the host. metrics: of the update. counters: after it.
        """
        info, (returns, lengths) = batch.finished_info(), batch.finished_episodes()
        progress, self.count = self.progress, self.count + 1
        self.seconds = time.monotonic() - self._began
        progress.step = counters.env_steps
        progress.episodes += len(returns)
        progress.returns.extend(returns)
        progress.lengths.extend(lengths)
        by_task = self._by_task(returns, info.get(TASK, ()))
        episodes = {
            "mean_episode_return": progress.score(by_task) if by_task else mean(returns),
            "mean_episode_length": mean(lengths),
            "mean_return": progress.mean_return(),
            **{f"mean_return_{task}": value for task, value in progress.task_means().items()},
            "mean_length": progress.mean_length(),
            "episodes": progress.episodes,
            **{f"info_{k}": self._info_mean(k, info.get(k, ())) for k in self._info_keywords},
        }
        self.newest = {
            **episodes,
            **metrics,
            "update_seconds": self.clock.updates.last,
            **episodes,  # whatever names an algorithm gives to its metrics
            **self._source.status(),
            **self._times(),
            "learnt_steps": counters.learnt_steps,
            "optimiser_steps": counters.optimiser_steps,
        }
        return self.newest

    def _by_task(self, returns: Sequence[float], tasks: Sequence[float]) -> dict[int, float]:
        """Adds returns to those of their tasks; returns the means of the tasks that they are of,
        {} with one task.
        """
        sums: dict[int, list[float]] = {}
        for task, value in zip(map(int, tasks), returns, strict=False):
            sums.setdefault(task, []).append(value)
        for number, kept in enumerate(self.progress.by_task.values()):
            kept.extend(sums.get(number, ()))
        known = range(len(self.progress.by_task))
        return {number: mean(values) for number, values in sums.items() if number in known}

    def write(self) -> None:
        """Writes the newest row, to which callbacks may have added numbers."""
        with self.clock.writing.running():
            self.log.write(self.progress.step, self.newest)

    def _info_mean(self, name: str, numbers: Sequence[float]) -> float:
        """Returns the mean over the episodes of an update; NaN if none has a number.

        Warns once for each keyword that an episode lacks; its number is NaN.
        """
        present = [number for number in numbers if not math.isnan(number)]
        if len(present) < len(numbers) and name not in self._missed_info:
            self._missed_info.add(name)
            _log.warning(
                f"an episode ended without a number {name!r} in its last info; info_{name} is the "
                "mean over the other episodes"
            )
        return mean(present)

    def _times(self) -> dict[str, float]:
        """Returns the speed of the last ten seconds, and the seconds since the last row by stage,
        so that you can add up rows.
        """
        before, self._last = self._last, self.reading()
        rate = self._rate.add(self.progress.step, self._last.time)
        stages = {f"time_{name}": value for name, value in spent(self._last, before).items()}
        return {**stages, "steps_per_second": rate}
