# SPDX-License-Identifier: Apache-2.0
"""Trains the agent of a scheme, one update at a time, in a script or a notebook.

    learner = Learner(scheme, target_steps=1_000_000, log_dir="logs/my_run")
    while not learner.done():
        learner.step()
        if learner.updates % 10 == 0:
            learner.print_info()
    learner.evaluate()

A run is what a program's run is: the same folder with logs.csv and model.tar, which resumes when a
Learner is made with the same log_dir, and which the programs can plot, evaluate and resume.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torchbeast.core.actors.contract import Actor
from torchbeast.core.base.checks import at_least, counted, require
from torchbeast.core.base.computing import CudaStream, OwnProcess, own_settings
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.storages.batch import Batch
from torchbeast.errors import UsageError, expanded
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted
from torchbeast.fleets.waiting import running_time, warn
from torchbeast.learner.parts import (
    env_spec,
    make_source,
    making_agent,
    making_weights,
    run_settings,
)
from torchbeast.reporting.diagnosis import Watchdog
from torchbeast.reporting.log_files import FILES, Log, Logger, read_logs
from torchbeast.reporting.run_folder import (
    RunConfig,
    RunFolder,
    Session,
    is_in_use,
    raise_failure,
)
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.callbacks import Callback, Callbacks
from torchbeast.run.checkpoint_writer import CheckpointNotWritten
from torchbeast.run.config import FIRST_CHECKPOINT_S, CheckpointConfig
from torchbeast.run.episodes import parallel_envs
from torchbeast.run.learner_run import DescribedEnv, LearnerRun
from torchbeast.run.running import RunningLearner
from torchbeast.run.training import Training
from torchbeast.schemes.scheme import Scheme

_log = logging.getLogger("torchbeast.learner")
_LOOK_S = 1.0  # between two looks at what a step waits for

_OPEN: weakref.WeakValueDictionary[Path, Learner] = weakref.WeakValueDictionary()


class Learner(RunningLearner):
    """Trains the agent of a Scheme. Use it from one thread, as a context manager or with `close`.

    The process stays yours: after every call, signals, torch's number of threads and its random
    numbers are as before. If a step takes more than 10 s, a warning says what it waits for. Ctrl-C
    in a notebook interrupts a step, which is dropped; the next step starts new episodes if it has
    to. An update that decentralised workers have begun is completed by the next step.

    Attributes:
        scheme: The scheme.
        target_steps: Environment steps at which the run ends.

    Example:
        ```python
        with Learner(scheme, target_steps=100_000, log_dir="logs/cartpole", seed=1) as learner:
            while not learner.done():
                learner.step()
                if learner.updates % 10 == 0:
                    learner.print_info()
            print(learner.evaluate(10))
        ```
    """

    _is_taken_over = False  # another Learner was made with its log_dir

    def __init__(
        self,
        scheme: Scheme,
        target_steps: int,
        log_dir: str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        seed: int | None = None,
    ) -> None:
        """Assembles a learner. If log_dir contains a run already, it continues from its model.tar.

        Args:
            scheme: The components of the agent, and how the work is divided.
            target_steps: Environment steps to train on; schedules end there.
            log_dir: Folder of the run. Default: the log_dir of the scheme's environments, else a
                new folder in ~/logs/torchbeast.
            callbacks: Called between steps in this order, see `Callback`.
            loggers: Get every row of logs.csv too, with the metrics that callbacks add.
            seed: Seed of weights, actions and every environment. Default: a random one, which is
                recorded.

        Raises:
            ValueError: For target_steps below 1.
            UsageError: If the run in log_dir does not fit the scheme, or log_dir cannot be used.
        """
        at_least(1, target_steps=target_steps)
        self._callbacks = Callbacks(callbacks)
        self.scheme = scheme
        self.target_steps = target_steps
        self._loggers = (*FILES, *loggers)
        self._env_options = {}
        self._config = _run_config(log_dir or scheme.train_envs_factory.log_dir, seed)
        if (earlier := _OPEN.get(self._config.folder)) is not None:
            earlier.close()  # the cell of a notebook that is run again
            earlier._is_taken_over = True
        _check_goes_on(self._config.folder)
        self._own = OwnProcess()
        self._open(None)

    @property
    def actor(self) -> Actor:
        """The network that is trained, with its present weights; call `actor.act` to choose
        actions.
        """
        if self.scheme.update_execution == "decentralised" and self._finalizer.alive:
            self._run.made.optimiser_step.state_dict()  # the workers have them
        return super().actor

    def step(self) -> dict[str, float]:
        """Collects a batch, trains on it, and calls the callbacks.

        With a ReplayBuffer, it samples a batch and collects new steps only when they are due. The
        step that reaches target_steps ends the run: it writes the checkpoint and stops the workers.

        Returns:
            The metrics of `get_metrics`.

        Raises:
            UsageError: If the run has ended, or its first failure was one that you can fix.
            RunError: If the run failed otherwise.
            RuntimeError: If a callback calls it.
        """
        if self._is_closed:
            raise UsageError(f"the run has ended: {self._what_ended_it()}")
        if self._callbacks.is_running:
            raise RuntimeError("step() cannot be called from a callback, which step() itself calls")
        self._callbacks.start(self, self._fail)
        version, is_taken = self.updates + 1, False
        try:
            with self._own, self._watching.step():
                batch = self._next_batch()
                is_taken = True
                self._learn_from(batch)
        except BaseException:
            with uninterrupted():
                self._drop_batch(version if is_taken else None)
            raise
        try:
            self._callbacks.step(self, self._training.row, self._fail)
            self._save_in_time()
        finally:  # an interrupt leaves the update, and the end, as they are
            with self._watching.step(), self._training.writing.running():
                self._row.release()
            if self.done():
                self.close()
        return self.get_metrics()

    def train(self, total_steps: int | None = None) -> dict[str, float]:
        """Trains until total_steps.

        Args:
            total_steps: Environment steps from the beginning of the run, at most target_steps,
                which is the default.

        Returns:
            The metrics of the last step, as in `get_metrics`.

        Raises:
            ValueError: If total_steps is more than target_steps.
            UsageError: As in `step`.
            RunError: As in `step`.
        """
        until = self.target_steps if total_steps is None else total_steps
        require(
            until <= self.target_steps,
            f"total_steps {until:,} is more than target_steps {self.target_steps:,}, at which "
            "schedules end: make a Learner with a larger target_steps",
        )
        while self.steps < until and not self.done():
            self.step()
        return self.get_metrics()

    def restore(self, path: str | Path | None = None) -> None:
        """Ends the present run, and continues from a checkpoint: weights, optimiser, counters,
        random numbers.

        Args:
            path: The checkpoint. Default: model.tar in log_dir.

        Raises:
            UsageError: If there is no checkpoint, or it belongs to another environment, network or
                algorithm.
            RunError: If the run failed.
        """
        own = self._session.folder.checkpoint
        found = own if path is None else expanded(path)
        if found != own and not found.exists():  # it saves its own; an earlier one may be kept
            raise UsageError(
                f"there is no checkpoint at {found}: use the path of a file such as {own}"
            )
        load = checkpoints.load_newest if found == own else checkpoints.load
        load(found)  # before this run ends
        self._end(is_saved=False)
        raise_failure(self._session.supervisor.failure, self._session.folder)
        self._open(found)

    def close(self) -> None:
        """Ends the run: writes the checkpoint and stops the workers. You may call it again.

        Raises:
            RunError: If a callback fails at the end, or the checkpoint cannot be written.
        """
        if self._end(is_saved=True):
            raise_failure(self._session.supervisor.failure, self._session.folder)

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the run

    def _open(self, resumed: Path | None) -> None:
        """Assembles everything; workers start at the first step."""
        self._is_closed = True
        self._ending = ExitStack()
        # A Learner that is forgotten leaves no workers behind.
        self._finalizer = weakref.finalize(self, self._ending.close)
        try:
            with self._own, own_settings():
                self._assemble(resumed)
        except BaseException:
            self._finalizer()
            raise
        _OPEN[self.log_dir] = self
        self._batches: Iterator[Batch] | None = None
        self._is_started = False
        self._save_at = time.monotonic() + FIRST_CHECKPOINT_S
        self._is_closed = self._is_taken_over = False
        if self.done():
            print(
                f"The run in {self.log_dir} is already complete ({self.steps:,} steps). "
                "Give another log_dir to train again.",
                flush=True,
            )
            self.close()

    def _assemble(self, resumed: Path | None) -> None:
        scheme, ending = self.scheme, self._ending
        spec = env_spec(scheme)
        settings = run_settings(scheme, spec, self._config, self.target_steps, self._loggers)
        supervisor = Supervisor()
        folder = RunFolder(self._config.folder, dict(settings.recorded))
        ending.callback(lambda: folder.finish(successful=supervisor.failure is None))
        self._session = Session(supervisor, folder)
        envs = scheme.train_envs_factory
        described = DescribedEnv(
            env=spec, observation_space=envs.single_frame_space, make=envs.make
        )
        run = LearnerRun(settings, described, self._session, resumed)
        run.assemble(making_agent(scheme), making_weights(scheme))
        if scheme.gradients is None:
            config = run.settings.learner
            source = functools.partial(make_source, scheme, config=config, ending=ending)
            self._source = ending.enter_context(run.source(source))
        else:
            from torchbeast.gradients.workers import gradient_workers
            from torchbeast.learner.gradients import gradient_fleet, make_worker

            config = dataclasses.replace(run.settings.learner, actor=run.made.agent.spec)
            make = functools.partial(make_worker, scheme, config, run.environment_seed)
            fleet = ending.enter_context(gradient_fleet(scheme, scheme.gradients, spec))
            step = run.made.optimiser_step
            joint = gradient_workers(make, scheme.gradients, step, fleet)
            self._source = run.join(ending.enter_context(closing(joint)))
        # Whatever `ending` refers to outlives a forgotten Learner: not one of its methods.
        callbacks, options = self._callbacks, self._env_options

        def also() -> dict[str, Any]:
            return {"callbacks": callbacks.states(), **options}

        self._hold(run, *ending.enter_context(run.training(self._source, also)))
        self._row = self._training.log = _RowInHand(self._training.log)
        ending.callback(self._row.release)
        ending.callback(supervisor.stop, "the learner was closed")
        at_once = settings.learner.online_rollouts.batch_size
        self._watching = _Watchdog(self._training, at_once)
        if (recorded := run.earlier.env_options) is not None:
            options["env_options"] = recorded
        if options:
            self._source.set_env_options(options["env_options"])
        self._cuda_stream = CudaStream(run.made.compute.device)
        callbacks.load(run.earlier.callbacks)

    def _learn_from(self, batch: Batch) -> None:
        try:
            has_learnt = self._training.learn_from(batch, self._cuda_stream)
        except Exception as error:
            self._fail(error)
        if not has_learnt:  # a worker has failed meanwhile
            self._fail(None)

    def _save_in_time(self) -> None:
        """Writes the checkpoint as often as the programs do, unless the run ends now anyway."""
        if self.done() or self._is_closed or time.monotonic() < self._save_at:
            return
        try:
            self.save_model()
        except CheckpointNotWritten as error:
            _log.warning("%s; the run continues", error)
        self._save_at = time.monotonic() + CheckpointConfig().checkpoint_interval

    @contextmanager
    def _test_envs(self, num_episodes: int) -> Iterator[VecEnv]:
        envs = self.scheme.test_envs_factory or self.scheme.train_envs_factory
        with closing(envs.make(parallel_envs(num_episodes, envs.num_agents))) as env:
            yield env

    def _next_batch(self) -> Batch:
        if not self._is_started:
            if workers := _workers(self.scheme):
                print(f"Starting {workers}.", flush=True)
            self._run.begin()
            self._source.start(self._session.supervisor)
            self._watching.start()
            self._is_started = True
        if self._batches is None:
            self._batches = self._source.batches()
        batch = next(self._batches, None)
        if batch is None:
            self._fail(None)
        return batch

    def _drop_batch(self, version: int | None) -> None:
        """Makes the next step begin with another batch.

        version: of the weights after the interrupted update; None: it has not begun.
        """
        self._batches = None  # so the source does not count the batch as learnt
        on_demand = self.scheme.grad_remote_workers > 0  # whatever the version
        if version is not None and not self._is_closed and not on_demand:
            self._training.publish_interrupted(version)

    def _fail(self, error: Exception | None, origin: str = "") -> NoReturn:
        """Ends the run and raises its first failure."""
        supervisor, folder = self._session
        if error is not None:
            supervisor.fail_at_end(origin, error)
        self._end(is_saved=True)
        raise_failure(supervisor.failure, folder)
        raise UsageError(f"the run has ended: {supervisor.reason}")

    def _what_ended_it(self) -> str:
        """Returns what ended the run, and what to do, as part of a message."""
        failure, learnt = self._session.supervisor.failure, f"after {self.steps:,} steps"
        again = "make another Learner with the same log_dir to continue"
        if failure is not None:
            last_line = str(failure).splitlines()[-1]  # of a traceback, its error
            return f"it failed {learnt} ({last_line}); {again}"
        if self._is_taken_over:
            return f"another Learner was made with its log_dir, {self.log_dir}: use that one"
        if self.steps >= self.target_steps:
            return (
                f"it reached target_steps {self.target_steps:,}; to continue, make another Learner "
                "with a larger target_steps"
            )
        return f"it was {'stopped' if self._is_stopped else 'closed'} {learnt}; {again}"

    def _end(self, is_saved: bool) -> bool:
        """Ends the run; returns False if it has ended before."""
        if self._is_closed:
            return False
        self._is_closed = True
        with ExitStack() as last:  # in reverse order; an interrupt of one leaves out no other
            last.callback(self._finalizer)
            if is_saved:
                last.callback(self._save_at_end)
            last.callback(self._session.supervisor.stop, "the learner was closed")
            # The first failure is the run's, unless it has one.
            fail = self._session.supervisor.fail_at_end
            last.callback(self._callbacks.end, self, lambda error, origin: fail(origin, error))
        return True

    def _save_at_end(self) -> None:
        with self._own:
            self._run.end(self._training, self._checkpoint_writer)


class _RowInHand:
    """Keeps each row of a log until callbacks have added their metrics."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._metrics: Mapping[str, float] = {}
        self._step: int | None = None  # of the row that is kept

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps a row; one that was kept is written before."""
        self.release()
        self._step, self._metrics = step, metrics

    def release(self) -> None:
        """Writes the row that is kept, if any."""
        step, self._step = self._step, None
        if step is not None:
            self._log.write(step, self._metrics)

    close = release  # its owner closes the log


class _Watchdog:
    """The watchdog of a Learner, in a thread of the supervisor. It does not know the Learner."""

    def __init__(self, training: Training, rollouts_at_once: int) -> None:
        """rollouts_at_once: rollouts in a batch."""
        self._training, self._rollouts_at_once = training, rollouts_at_once
        self._is_in_step = False

    def start(self) -> None:
        """Starts the thread, which ends with the run."""
        ended, supervisor = threading.Event(), self._training.supervisor
        supervisor.on_close(ended.set)
        supervisor.start_thread("watch", lambda: self._watch(ended))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watches the block: between two steps a Learner waits for nobody."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def _watch(self, ended: threading.Event) -> None:
        watchdog = Watchdog(running_time(), self._rollouts_at_once)
        source = self._training.source
        while not ended.wait(_LOOK_S):
            now = running_time()
            if not self._is_in_step:
                watchdog.restart(now)
                continue
            updates, files = self._training.updates_here, self._training.waits_for_files()
            if stall := watchdog.check(updates, source.status(), now, source.hanging(), files):
                warn(stall, is_logged=not files)


def _check_goes_on(log_dir: Path) -> None:
    """Raises UsageError for a log without a checkpoint, because a new run would replace it.

    A folder that another process uses is refused elsewhere.
    """
    if checkpoints.existing(log_dir / "model.tar") or not (log_dir / "logs.csv").exists():
        return
    if not is_in_use(log_dir) and next(read_logs(log_dir), None) is not None:
        raise UsageError(
            f"{log_dir} has the log of a run but no model.tar to resume from, perhaps because the "
            "run was not closed: use another log_dir, or delete its logs.csv to start over"
        )


def _workers(scheme: Scheme) -> str:
    """Returns how many workers the scheme has as text; "" for none."""
    of_each, learning = scheme.col_remote_workers, scheme.grad_remote_workers
    said = counted(of_each, "worker") if of_each else ""
    if not learning:
        return said
    return f"{counted(learning, 'gradient worker')}{said and f', {said} for each'}"


def _run_config(log_dir: str | Path | None, seed: int | None) -> RunConfig:
    if log_dir is None:
        return RunConfig(seed=seed)
    path = expanded(log_dir).absolute()
    return RunConfig(xpid=path.name, savedir=str(path.parent), seed=seed)
