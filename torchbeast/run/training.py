# SPDX-License-Identifier: Apache-2.0
"""The training loop: collect, update, publish, record. It does not know gRPC or processes.

    source.batches() -> optimiser_step.update() -> weights.publish() -> log files
                        one at a time, under a lock that also protects copying checkpoints

Learner threads run `_learn`, or a thread of the caller runs `learn_from`. Any thread may read
`progress` and call `checkpoint`.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchbeast.collect.contract import Publisher, Source
from torchbeast.core.base.computing import CudaStream, own_settings
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import running_time, wait_until
from torchbeast.reporting.diagnosis import Reading, spent
from torchbeast.reporting.display import Progress, Rate, mean
from torchbeast.reporting.log_files import Log
from torchbeast.run import checkpoint as checkpoints


class Stopwatch:
    """Measures blocks, in one thread at a time. Any thread may read it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # Seconds of the blocks that have ended, and the start of the running one.
        self._spent: tuple[float, float | None] = 0.0, None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures the block."""
        spent, began = self._spent[0], self._now()
        self._spent = spent, began
        try:
            yield
        finally:
            self._spent = spent + self._now() - began, None

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
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._began = now, now()
        self._updates, self._pauses = Stopwatch(now), Stopwatch(now)

    def learning(self) -> AbstractContextManager[None]:
        """Measures an update; used by one thread at a time."""
        return self._updates.running()

    def pausing(self) -> AbstractContextManager[None]:
        """Measures callbacks, which are neither; used by one thread at a time."""
        return self._pauses.running()

    @property
    def pauses(self) -> bool:
        """Whether a callback runs."""
        return self._pauses.read()[1] > 0

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent until now, by stage."""
        learning, pausing = self._updates.read()[0], self._pauses.read()[0]
        return {"learning": learning, "waiting": self._now() - self._began - learning - pausing}


_log = logging.getLogger("torchbeast.learner")


DONE = "all steps are learnt"
_UPDATE_S = 120.0  # expected longest update, unless a longer one has been seen
_WRITING_S = 1.0  # longest time that writing a row of the log should take
_TRACED_UPDATE = 5  # of the process; the first ones are slower


class NoMoment(RunError):
    """An update did not end within the time limit, so nothing was copied."""


@dataclass(kw_only=True, eq=False)
class Training:
    """Trains until `total_steps`, then stops the supervisor with DONE.

    keep: called when an update fails because of a NaN; saves the state before it and returns the
        path, or None if it does not save it. Not called if that state is not finite either.
    callbacks: called between two updates with the row of the log, to which it may add numbers.
    learns_all: train on every batch that the source yields, even if the run has ended meanwhile,
        because other learners wait for this one's share of the update.
    """

    source: Source
    optimiser_step: OptimiserStep[Any]  # or a JointLearner, with the same interface
    weights: Publisher
    device: torch.device
    log: Log
    supervisor: Supervisor
    total_steps: int
    progress: Progress
    info_keywords: Sequence[str]  # numbers of episodes to log
    pause_at: int | None  # step at which to stop before total_steps
    folder: Path = Path()  # of the log's files
    trace: Path | None = None  # file for the profiler's trace of one update
    keep: Callable[[dict[str, Any]], Path | None] = lambda state: None
    after_first_update: Callable[[], None] = lambda: None  # of this process
    after_update: Callable[[int, Mapping[str, float]], None] = lambda step, row: None
    callbacks: Callable[[dict[str, float]], None] | None = None
    learns_all: bool = False

    def __post_init__(self) -> None:
        self.metrics: Mapping[str, float] = {}  # last row of the log
        self.row: dict[str, float] = {}  # the same, to which callbacks add
        self._missed_info: set[str] = set()  # keywords that an episode lacked
        self._lock = threading.RLock()  # callbacks copy checkpoints while they hold it
        self._clock = LearnerClock()
        self.writing = Stopwatch(time.perf_counter)  # measures writing the log
        self._last_row = Reading(time.monotonic(), {})
        self._longest_s = 0.0  # seconds of the longest update so far
        self._updates_before = self.updates
        self._first_step, self._began = self.progress.step, time.monotonic()
        self.seconds = 0.0  # from the start to the last update
        self._rate = Rate()
        self._rate.add(self._first_step, self._began)

    @property
    def updates(self) -> int:
        """Number of updates, across restarts."""
        return self.optimiser_step.version

    @property
    def updates_here(self) -> int:
        """Number of updates of this process."""
        return self.updates - self._updates_before

    @property
    def steps_here(self) -> int:
        """Number of env steps learnt by this process."""
        return self.progress.step - self._first_step

    def start(self, num_threads: int) -> None:
        """Starts training in threads of the supervisor."""
        for i in range(num_threads):
            self.supervisor.start_thread(f"learner-{i}", self._learn)

    def reading(self) -> Reading:
        """Returns the seconds spent on acting and learning until now, by stage."""
        seconds = self.source.seconds() | self._clock.seconds()
        return Reading(time.monotonic(), seconds, self.writing.read()[0])

    @property
    def is_in_callback(self) -> bool:
        """Whether a callback runs, for example an evaluation."""
        return self._clock.pauses

    def waits_for_files(self) -> str:
        """Returns a message if the file system takes long to write a row of the log, else ""."""
        is_slow = self.writing.read()[1] > _WRITING_S
        return f"the learner waits for files in {self.folder}" if is_slow else ""

    @property
    def patience_s(self) -> float:
        """Seconds after which an update counts as hanging."""
        return max(_UPDATE_S, 2 * self._longest_s)

    def checkpoint(self, wait_s: float | None = None) -> dict[str, Any]:
        """Returns a consistent copy of the state that a resumed run needs, between two updates.

        wait_s: raises NoMoment if an update does not end within this number of seconds; None:
            patience_s.
        """
        wait_s = self.patience_s if wait_s is None else wait_s
        if not wait_until(running_time() + wait_s, functools.partial(self._lock.acquire, True)):
            raise NoMoment(
                f"no checkpoint was written, because an update had not ended after {wait_s:,.0f} "
                "s; progress since the last checkpoint is lost"
            )
        try:
            return copy.deepcopy(self._state())
        finally:
            self._lock.release()

    def _state(self) -> dict[str, Any]:
        """Returns the state without copying tensors."""
        return {
            **self.optimiser_step.state_dict(),
            "stats": self.progress.state_dict(),
            "rng": checkpoints.rng_state(),
        }

    def _learn(self) -> None:
        cuda_stream = CudaStream(self.device)
        for on_host in self.source.batches():
            if not self.learn_from(on_host, cuda_stream):
                return

    def learn_from(self, on_host: Batch, cuda_stream: CudaStream) -> bool:
        """Trains on a batch, publishes and records. Returns False if the run has already ended.

        cuda_stream: of the calling thread.
        """
        with own_settings():
            with cuda_stream:  # copies while another thread updates
                batch = on_host.map(cuda_stream.to_device)
            with self._lock:
                if self.supervisor.ended and not self.learns_all:
                    return False
                with self._clock.learning():
                    self._update(batch.map(cuda_stream.hand_over), on_host)
                self._finish_row()
                self._after_update()
        return True

    def _finish_row(self) -> None:
        """Writes the row of the log, once callbacks have added their numbers."""
        self.row = dict(self.metrics)
        try:
            if self.callbacks is not None:
                with self._clock.pausing():
                    self.callbacks(self.row)
        finally:
            self.metrics = self.row
            with self.writing.running():
                self.log.write(self.progress.step, self.row)

    def publish_interrupted(self, version: int) -> None:
        """Publishes the weights after an interrupted update, which may have changed them.

        version: for which workers with a fixed lag wait, as after a complete update.
        """
        step = self.optimiser_step
        step.counters.version = version
        self.weights.publish(step.algo.actor, version)

    def _update(self, batch: Batch, on_host: Batch) -> None:
        # Lags and episodes come from the batch on the host, which avoids waiting for the device.
        lags, before = on_host.lags(self.updates), time.perf_counter()
        step = self.optimiser_step
        with self._traced():
            try:
                metrics, feedback = step.update(batch)
            except NonFiniteError as error:
                raise NonFiniteError(f"{error}. {self._keep_last_good()}") from error
        on_host.give_feedback(feedback)
        self.progress.step = step.counters.env_steps
        self.weights.publish(step.algo.actor, step.version)
        self.seconds = time.monotonic() - self._began
        seconds = time.perf_counter() - before
        self._longest_s = max(self._longest_s, seconds)
        self._record(on_host, {**metrics, **lags, "update_seconds": seconds})

    def _after_update(self) -> None:
        if self.updates_here == 1:
            self.after_first_update()
        self.after_update(self.progress.step, self.metrics)
        if self.progress.step >= self.total_steps:
            self.supervisor.stop(DONE)
        elif self.pause_at is not None and self.progress.step >= self.pause_at:
            self.supervisor.stop(f"--pause_at {self.pause_at:,}")

    def _keep_last_good(self) -> str:
        """Saves the current state, which the failed update did not change; returns a message."""
        if (name := checkpoints.first_non_finite_tensor(self._state())) is not None:
            return f"{name} was already not finite, so the previous state was not saved"
        try:
            path = self.keep(self._state())
        except OSError as error:
            return f"The previous state could not be saved: {error}"
        if path is None:
            return "No state was saved"
        return f"The previous state is in {path}; the checkpoint is unchanged"

    def _record(self, batch: Batch, metrics: dict[str, float]) -> None:
        counters, info = self.optimiser_step.counters, batch.finished_info()
        returns, lengths = batch.finished_episodes()
        self.progress.loss = metrics.get("total_loss", self.progress.loss)
        self.progress.mean_lag = metrics.get("mean_lag", math.nan)
        self.progress.max_lag = metrics.get("max_lag", math.nan)
        self.progress.relevant_share = metrics.get("relevant_share", math.nan)
        self.progress.episodes += len(returns)
        self.progress.returns.extend(returns)
        self.progress.lengths.extend(lengths)
        episodes = {
            "mean_episode_return": mean(returns),
            "mean_episode_length": mean(lengths),
            "mean_return": self.progress.mean_return(),
            "mean_length": self.progress.mean_length(),
            "episodes": self.progress.episodes,
            **{f"info_{k}": self._info_mean(k, info.get(k, ())) for k in self.info_keywords},
        }
        self.metrics = {
            **episodes,
            **metrics,
            **episodes,  # whatever names an algorithm gives to its metrics
            **self.source.status(),
            **self._times(),
            "learnt_steps": counters.learnt_steps,
            "optimiser_steps": counters.optimiser_steps,
        }

    def _info_mean(self, name: str, numbers: Sequence[float]) -> float:
        """Returns the mean over the episodes of an update; NaN if none has a number.

        Warns once for each keyword that an episode lacks; its number is NaN.
        """
        given = [number for number in numbers if not math.isnan(number)]
        if len(given) < len(numbers) and name not in self._missed_info:
            self._missed_info.add(name)
            _log.warning(
                "an episode ended without a number %r in its last info; info_%s is the mean over "
                "the other episodes",
                name,
                name,
            )
        return mean(given)

    def _times(self) -> dict[str, float]:
        """Returns the speed of the last ten seconds, and the seconds since the last row by stage,
        so that you can add up rows.
        """
        before, self._last_row = self._last_row, self.reading()
        rate = self._rate.add(self.progress.step, self._last_row.time)
        stages = {f"time_{name}": value for name, value in spent(self._last_row, before).items()}
        return {**stages, "steps_per_second": rate}

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if self.trace is None or self.updates_here + 1 != _TRACED_UPDATE:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(str(self.trace))
