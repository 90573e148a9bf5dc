# SPDX-License-Identifier: Apache-2.0
"""The loop of a run: collect, update, publish, log; and the rows of logs.csv. It does not know gRPC
or processes.

    LearnerThread.step    collect    the next batch of the source; workers continue meanwhile
                          copy       it to the GPU, while another thread updates
      one thread at a     update     OptimiserStep.update
      time, under a       publish    the new weights to the workers
      lock                callbacks  which may add numbers to the row, such as evaluations
                          log        the row of logs.csv, then the checkpoint if it is due

Each learner thread of a program repeats the step; `Learner.step` takes one. Any thread may read the
progress and call `checkpoint`, which copies the state between two updates. `Rows` puts together a
row: the metrics of an update, the progress of the run, and where time goes.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchbeast.collect.contract import Source
from torchbeast.core.algos.base import Counters
from torchbeast.core.base.computing import CudaStream, own_settings
from torchbeast.core.envs.tasks import TASK
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.optimiser_step import NonFiniteError
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted
from torchbeast.fleets.waiting import running_time, wait_until
from torchbeast.reporting.diagnosis import Reading, spent
from torchbeast.reporting.display import Progress, Rate, mean
from torchbeast.reporting.loggers import Log
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.assemble import Assembled
from torchbeast.run.checkpoint_writer import CheckpointWriter, failing_is_a_warning
from torchbeast.run.config import FIRST_CHECKPOINT_S

_log = logging.getLogger("torchbeast.learner")

DONE = "all steps are learnt"
ENOUGH = "a callback"  # has stopped the run
_UPDATE_S = 120.0  # expected longest update, unless a longer one has been seen
_WRITING_S = 1.0  # longest time that writing a row of the log should take
_TRACED_UPDATE = 5  # of the process; the first ones are slower

Row = dict[str, float]
"""The metrics of an update, by the names of columns."""

Consumer = Callable[[int, Row], None]
"""Gets the row of each update: called with the environment steps of the run, and the row."""


@dataclass(kw_only=True, eq=False)
class Training:
    """What the learner threads of a run share: they train until one of `stops_at` is reached, and
    then stop the supervisor.

    Attributes:
        source: Yields the batches.
        made: The learner. Its optimiser step may be a JointLearner, with the same interface.
        rows: Makes the rows of the log, and writes them.
        progress: Steps and episodes of the run.
        writer: Writes the checkpoints of the run.
        stops_at: Environment steps at which the run ends, by the reason.
        consumers: Called after the log, one after the other and never during an update.
        learns_all: Train on every batch that the source yields, even if the run has ended
            meanwhile, because other learners wait for this one's share of the update.
        own: A context with the run's random numbers, in a process that is not its own.
        trace: File for the profiler's trace of one update.
    """

    source: Source
    made: Assembled
    supervisor: Supervisor
    rows: Rows
    writer: CheckpointWriter
    stops_at: Mapping[str, int]
    consumers: Sequence[Consumer] = ()
    learns_all: bool = False
    own: AbstractContextManager[Any] = nullcontext()  # noqa: RUF009 - stateless
    trace: Path | None = None

    def __post_init__(self) -> None:
        self.lock = threading.RLock()  # held from an update to the end of its step
        self.progress = self.rows.progress

    @property
    def updates(self) -> int:
        """Number of updates, across restarts."""
        return self.made.optimiser_step.version

    def start(self, num_threads: int, callbacks: Consumer) -> None:
        """Repeats the step of the loop in threads of the supervisor, until the run ends."""
        for i in range(num_threads):
            self.supervisor.start_thread(f"learner-{i}", lambda: self._learn(callbacks))

    def _learn(self, callbacks: Consumer) -> None:
        thread = LearnerThread(self)
        while thread.step(callbacks) is not None:
            pass

    def update(self, batch: Batch, on_device: Batch) -> dict[str, float]:
        """Trains on a batch, and gives the source its feedback; returns the metrics of the update.

        batch: on the host, where reading its lags does not wait for the device.
        """
        lags = batch.lags(self.updates)
        with self._traced():
            try:
                metrics, feedback = self.made.optimiser_step.update(on_device)
            except NonFiniteError as error:  # which ends the run
                kept = self.writer.keep_last_good(self._state)  # which it did not change
                raise NonFiniteError(f"{error}. {kept}") from error
        batch.give_feedback(feedback)
        return {**metrics, **lags}

    def publish(self) -> None:
        """Publishes the weights of the last update."""
        self.made.weights.publish(self.made.agent.model, self.updates)

    def publish_interrupted(self, version: int) -> None:
        """Publishes the weights after an interrupted update, which may have changed them.

        version: for which workers with a fixed lag wait, as after a complete update. A JointLearner
        completes the update itself, before the next one.
        """
        step: Any = self.made.optimiser_step
        if step is not self.source:
            step.counters.version = version
            self.publish()

    def hand_out(self, row: Row, callbacks: Consumer) -> None:
        """Gives the row of an update to the callbacks, then to the log, then to the consumers."""
        step, clock = self.progress.step, self.rows.clock
        try:
            with clock.pauses.running():
                callbacks(step, row)
        finally:
            self.rows.write()
        with clock.pauses.running():
            for consumer in self.consumers:
                consumer(step, row)
        for reason, last_step in self.stops_at.items():
            if step >= last_step:
                self.supervisor.stop(reason)

    def waits_for_files(self) -> str:
        """Returns a message if the file system takes long to write a row of the log, else ""."""
        is_slow = self.rows.clock.writing.read()[1] > _WRITING_S
        return f"the learner waits for files in {self.writer.folder.path}" if is_slow else ""

    @property
    def patience_s(self) -> float:
        """Seconds after which an update counts as hanging."""
        clock = self.rows.clock  # a checkpoint with a replay is a pause
        return max(_UPDATE_S, 2 * clock.updates.longest, 2 * clock.pauses.longest)

    def checkpoint(self) -> dict[str, Any]:
        """Returns all that a resumed run needs but the replay, copied between two updates.

        Raises RunError if an update does not end within patience_s.
        """
        wait_s = self.patience_s
        if not wait_until(running_time() + wait_s, functools.partial(self.lock.acquire, True)):
            raise RunError(
                f"no checkpoint was written, because an update had not ended after {wait_s:,.0f} "
                "s; progress since the last checkpoint is lost"
            )
        try:
            with self.own:
                state = copy.deepcopy(self._state())
        finally:
            self.lock.release()
        return {**state, **self.writer.labels, **self.writer.also()}

    def save(self) -> None:
        """Writes the checkpoint of the run, unless nothing was learnt or checkpoints are disabled.

        Raises CheckpointNotWritten, and RunError as `checkpoint`.
        """
        if self.updates:
            self.writer.save(self.checkpoint)

    def _state(self) -> dict[str, Any]:
        """Returns the state without copying tensors."""
        return {
            **self.made.optimiser_step.state_dict(),
            "stats": self.progress.state_dict(),
            "rng": checkpoints.rng_state(),
        }

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if self.trace is None or self.rows.count + 1 != _TRACED_UPDATE:
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(str(self.trace))


class LearnerThread:
    """The loop of one learner thread, one step at a time.

    An interrupt, such as Ctrl-C in a notebook, drops the batch of the step, and the next step
    continues with another one. After the update nothing is dropped, even if a callback is
    interrupted.
    """

    def __init__(self, training: Training) -> None:
        """Call it in the thread that will call `step`."""
        self._run = training
        self._cuda_stream = CudaStream(training.made.compute.device)
        self._batches: Iterator[Batch] | None = None  # None: ask the source for another iterator
        self._is_asked = False  # whether a step has asked for a batch and not trained on it
        self._is_taken = False  # whether it got the batch, whose version workers may wait for

    def step(self, callbacks: Consumer) -> Row | None:
        """Takes a step of the loop. Returns the row of its update, or None if the run has ended.

        callbacks: called before the row is logged, and may add numbers to it.
        """
        run, clock = self._run, self._run.rows.clock
        with clock.steps.running():
            with run.own, self._dropping_batch():
                batch = self.next_batch()  # collect: workers act meanwhile
                if batch is None:
                    return None
                with own_settings(), self._cuda_stream:  # while another thread updates
                    copied = batch.map(self._cuda_stream.to_device)
            with run.lock:
                if run.supervisor.ended and not run.learns_all:
                    return None
                with run.own, own_settings(), self._dropping_batch(self._publish_interrupted):
                    with clock.updates.running():
                        on_device = copied.map(self._cuda_stream.hand_over)
                        metrics = run.update(batch, on_device)  # update
                        run.publish()  # publish
                    row = run.rows.make(batch, metrics, run.made.optimiser_step.counters)
                    self._is_asked = self._is_taken = False
                run.hand_out(row, callbacks)  # callbacks, log, checkpoints
                return row

    def _publish_interrupted(self, version: int) -> None:
        self._run.publish_interrupted(version)
        self._is_taken = False

    def next_batch(self) -> Batch | None:
        """Returns the next batch of the source; None once it is closed. Drops the last one, if an
        interrupt came before its update.
        """
        if self._is_asked or self._batches is None:
            self._batches = self._run.source.batches()
        if self._is_taken:
            with uninterrupted(), own_settings():
                self._publish_interrupted(self._run.updates + 1)
        self._is_asked = True
        batch = next(self._batches, None)
        self._is_taken = batch is not None
        return batch

    @contextmanager
    def _dropping_batch(
        self, publish: Callable[[int], object] = lambda version: None
    ) -> Iterator[None]:
        """Drops the batch if the block does not complete, so that the source does not count it.

        publish: called after an interrupt, with the version that the update would have had.
        """
        version = self._run.updates + 1
        try:
            yield
        except BaseException as error:
            with uninterrupted():
                self._batches = None
                if not isinstance(error, Exception):
                    publish(version)
            raise


class PeriodicCheckpoints:
    """Saves the checkpoint of a run after a minute, then at intervals, until the run ends."""

    def __init__(self, training: Training, interval_s: float) -> None:
        self._training, self._interval_s = training, interval_s
        self._due = running_time() + min(FIRST_CHECKPOINT_S, interval_s)

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        """Saves if it is time. The last checkpoint is written when the threads have ended."""
        if running_time() >= self._due and not self._training.supervisor.ended:
            with failing_is_a_warning():
                self._training.save()
            self._due = running_time() + self._interval_s


# --- the rows of the log


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

    @property
    def is_running(self) -> bool:
        """Whether a block runs now."""
        return self._spent[1] is not None

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
        steps: Runs while a step of the loop does; with several threads only `is_running` counts.
        updates: Measures updates.
        pauses: Measures callbacks, which are neither.
        writing: Measures writing rows, which is a part of waiting.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._began, self._waited = now, now(), 0.0
        self.steps, self.updates = Stopwatch(now), Stopwatch(now)
        self.pauses, self.writing = Stopwatch(now), Stopwatch(now)

    @property
    def is_pausing(self) -> bool:
        """Whether a callback runs, or no step, because a Learner's user does something else."""
        return self.pauses.is_running or not self.steps.is_running

    def seconds(self) -> dict[str, float]:
        """Returns the seconds spent until now, by stage."""
        learning, pausing = self.updates.read()[0], self.pauses.read()[0]
        waiting = self._now() - self._began - learning - pausing
        self._waited = max(self._waited, waiting)  # the clocks are read a moment apart
        return {"learning": learning, "waiting": self._waited}


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
        """Returns the mean over the episodes of an update; NaN if none has a finite number.

        Warns once for each keyword that an episode lacks; its number is NaN.
        """
        present = [number for number in numbers if math.isfinite(number)]
        if len(present) < len(numbers) and name not in self._missed_info:
            self._missed_info.add(name)
            _log.warning(
                f"an episode ended without a finite number {name!r} in its last info; info_{name} "
                "is the mean over the other episodes"
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
