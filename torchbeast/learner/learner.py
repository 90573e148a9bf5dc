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
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

from torchbeast.core.actors.contract import Actor
from torchbeast.core.base.checks import at_least, counted, require, suggesting
from torchbeast.core.base.computing import OwnProcess, own_settings
from torchbeast.core.envs.tasks import num_tasks
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError, expanded
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted
from torchbeast.learner.plan import plan_of
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.loggers import LogConfig, Logger
from torchbeast.reporting.run_folder import RunConfig, RunFolder, Session, is_in_use, raise_failure
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.callbacks import Callback, Callbacks, RunningLearner
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.episodes import parallel_envs
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.training import DONE, LearnerThread
from torchbeast.schemes.scheme import Scheme

_CLOSED, _OTHER_LEARNER = "the user", "another Learner"

_OPEN: weakref.WeakValueDictionary[Path, Learner] = weakref.WeakValueDictionary()


@suggesting
class Learner(RunningLearner):
    """Trains the agent of a Scheme. Use it from one thread, as a context manager or with `close`.

    The process stays yours: after every call, signals, torch's number of threads and its random
    numbers on the CPU are as before. If a step takes more than 10 s, a warning says what it waits
    for. Ctrl-C in a notebook interrupts a step, which is dropped; the next step starts new episodes
    if it has to. An update that decentralised workers have begun is completed by the next step.

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

    def __init__(
        self,
        scheme: Scheme,
        target_steps: int,
        log_dir: str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        log_interval: float = 0.0,
        disable_tensorboard: bool = False,
        seed: int | None = None,
    ) -> None:
        """Assembles a learner. If log_dir contains a run already, it continues from its model.tar.

        Args:
            scheme: The components of the agent, and how the work is divided.
            target_steps: Environment steps to train on; schedules end there.
            log_dir: Folder of the run. Default: the log_dir of the scheme's environments, else a
                new folder in ~/logs/torchbeast.
            callbacks: Called between steps in this order, see `Callback`.
            loggers: Get a row for every update, with the metrics that callbacks add.
            log_interval: Minimum number of seconds between rows of logs.csv and TensorBoard.
            disable_tensorboard: Do not write TensorBoard's events.
            seed: Seed of weights, actions and every environment. Default: a random one, which is
                recorded.

        Raises:
            ValueError: For target_steps below 1, or log_interval below 0.
            UsageError: If the run in log_dir does not fit the scheme, or log_dir cannot be used.
        """
        target_steps = int(target_steps)  # which may be written as 1e6
        at_least(1, target_steps=target_steps)
        self._callbacks = Callbacks(callbacks)
        self.scheme = scheme
        self.target_steps = target_steps
        log = LogConfig(log_interval=log_interval, disable_tensorboard=disable_tensorboard)
        self._loggers = (*log.loggers(), *loggers)
        self._config = _run_config(log_dir or scheme.train_envs_factory.log_dir, seed)
        if (earlier := _OPEN.get(self._config.folder)) is not None:
            earlier.close()  # the cell of a notebook that is run again
        _check_goes_on(self._config.folder)
        self._open(None)
        if earlier is not None:
            earlier._ended_by = _OTHER_LEARNER

    @property
    def actor(self) -> Actor:
        """The network that is trained, with its present weights; call `actor.act` to choose
        actions.
        """
        if self.scheme.update_execution == "decentralised" and self._finalizer.alive:
            self._training.made.optimiser_step.state_dict()  # the workers have them
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
        if self._ended_by:
            raise UsageError(f"the run has ended: {self._what_ended_it()}")
        if self._callbacks.is_running:
            raise RuntimeError("step() cannot be called from a callback, which step() itself calls")
        try:
            row = self._started().step(lambda step, row: self._callbacks.step(self, row))
        except Exception as error:
            self._fail(error)
        finally:  # an interrupt leaves the update, and the end, as they are
            if self.done():
                self.close()
        if row is None:  # a worker has failed
            self._fail(None)
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
        supervisor, folder = self._run.session
        newest = folder.checkpoint
        resumed = newest if path is None else expanded(path)
        load = checkpoints.load_newest if resumed == newest else checkpoints.load
        found: Any = load(resumed)
        if resumed != newest:
            found = checkpoints.FoundCheckpoint(found, resumed)
        self._run.check_fits(EarlierRun(found))  # before this run ends
        self._end(is_saved=False)
        raise_failure(supervisor.failure, folder)
        self._open(resumed)

    def close(self) -> None:
        """Ends the run: writes the checkpoint and stops the workers. You may call it again.

        Raises:
            RunError: If a callback fails at the end, or the checkpoint cannot be written.
        """
        if self._end(is_saved=True):
            raise_failure(self._run.session.supervisor.failure, self._run.session.folder)

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the run

    def _open(self, resumed: Path | None) -> None:
        """Assembles everything; workers start at the first step."""
        self._ended_by, ending, own = _CLOSED, ExitStack(), OwnProcess()
        # A Learner that is forgotten leaves no workers behind.
        self._finalizer = weakref.finalize(self, ending.close)
        try:
            with own, own_settings():
                plan = plan_of(self.scheme, self._config, self.target_steps, self._loggers)
                supervisor = Supervisor()
                folder = RunFolder(self._config.folder, dict(plan.recorded))
                # Whatever `ending` refers to outlives a forgotten Learner: not one of its methods.
                ending.callback(
                    lambda: folder.finish(  # it has not ended if it could not be assembled
                        supervisor.ended and supervisor.failure is None, supervisor.reason == DONE
                    )
                )
                self._run = LearnerRun(plan, Session(supervisor, folder), resumed)
                training = self._run.training(self._callbacks.entries, ending, own)
                self._hold(self._run.earlier, training)
                ending.callback(supervisor.stop, "the learner was closed")
        except BaseException:
            self._finalizer()
            raise
        _OPEN[self.log_dir] = self
        self._thread: LearnerThread | None = None  # until the first step
        self._ended_by = ""
        if self.done():
            if self._callbacks.are_due(self._run.earlier, self.steps):
                self._make_up()
            print(
                f"The run in {self.log_dir} is already complete ({self.steps:,} steps). "
                "Give another log_dir to train again.",
                flush=True,
            )
            supervisor.stop(DONE)
            self.close()

    def _make_up(self) -> None:
        """Plays the last evaluation of the earlier run, which was interrupted."""
        try:
            self._callbacks.start(self)
            self._training.save()
        except Exception as error:
            self._fail(error)

    def _started(self) -> LearnerThread:
        """Starts the callbacks and, in the first step, the workers; returns the loop."""
        self._callbacks.start(self)
        if self._thread is None:
            with self._training.own, uninterrupted():  # what is started twice would not work
                if workers := _workers(self.scheme):
                    print(f"Starting {workers}.", flush=True)
                self._run.begin()
                self._run.start(self._training)
                self._thread = LearnerThread(self._training)
        return self._thread

    def _test_envs(self, num_episodes: int) -> AbstractContextManager[VecEnv]:
        tests = self.scheme.test_envs_factory
        envs = tests or self.scheme.train_envs_factory
        spec = envs.env_kwargs.get("env")
        if tests is None and isinstance(spec, EnvSpec):  # its shares are for training
            kwargs = {**envs.env_kwargs, "env": spec.with_shares()}
            envs = dataclasses.replace(envs, env_kwargs=kwargs)
        multiple = envs.num_agents * num_tasks(envs.single_frame_space)
        return closing(envs.make(parallel_envs(num_episodes, multiple)))

    def _fail(self, error: Exception | None) -> NoReturn:
        """Ends the run and raises its first failure."""
        supervisor, folder = self._run.session
        if error is not None and supervisor.failure is None:
            supervisor.fail_at_end("", error)
        self._end(is_saved=True)
        raise_failure(supervisor.failure, folder)
        raise UsageError(f"the run has ended: {supervisor.reason}")

    def _what_ended_it(self) -> str:
        """Returns what ended the run, and what to do, as part of a message."""
        failure, learnt = self._run.session.supervisor.failure, f"after {self.steps:,} steps"
        again = "make another Learner with the same log_dir to continue"
        if failure is not None:
            last_line = str(failure).splitlines()[-1]  # of a traceback, its error
            return f"it failed {learnt} ({last_line}); {again}"
        if self._ended_by == _OTHER_LEARNER:
            return f"another Learner was made with its log_dir, {self.log_dir}: use that one"
        if self.steps >= self.target_steps:
            return (
                f"it reached target_steps {self.target_steps:,}; to continue, make another Learner "
                "with a larger target_steps"
            )
        return f"it was {'stopped' if self._is_stopped else 'closed'} {learnt}; {again}"

    def _end(self, is_saved: bool) -> bool:
        """Ends the run; returns False if it has ended before."""
        if self._ended_by:
            return False
        self._ended_by, run = _CLOSED, self._run
        with ExitStack() as last:  # in reverse order; an interrupt of one leaves out no other
            last.callback(self._finalizer)
            if is_saved:
                last.callback(run.end, self._training, lambda: self._callbacks.end(self))
            else:
                last.callback(self._callbacks.end, self)
            last.callback(run.session.supervisor.stop, "the learner was closed")
        return True


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
