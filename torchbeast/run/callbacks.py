# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what a run calls between its updates, and the built-in ones. A `Learner` takes them as
`callbacks=[...]`, the programs as `--callback` and `--eval_every`.

    a step of the run    collect, learn, publish --> on_step of each --> the row of logs.csv
          first time:    on_start of each, before
          last time:     on_end of each, after, and then model.tar

They are called one after the other in the order of their list, and never during an update: by a
Learner in the thread that calls its own methods, by a program in its main thread (on_start and
on_end) and in its learner threads (on_step).
"""

from __future__ import annotations

import io
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchbeast.core.base import specs
from torchbeast.core.base.checks import above, at_least, require
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.env_process import EnvProcess
from torchbeast.errors import UsageError
from torchbeast.fleets.waiting import say
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.checkpoint_writer import failing_is_a_warning
from torchbeast.run.config import CallbacksConfig
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.running import RunningLearner
from torchbeast.run.training import Training
from torchbeast.seeds import seed_of

if TYPE_CHECKING:  # for evaluations
    from torchbeast.run.scores import Scores


class Callback:
    """Base class of callbacks: what a run does between its updates. Override what you need.

    A callback gets the running learner: a `Learner`, or in a program an object with the same
    properties and the methods `done`, `stop`, `get_metrics`, `print_info`, `save_model`, `evaluate`
    and `set_env_options`. `learner.stop()` ends the run after the present step. Do not call a
    Learner's `step`, `train`, `restore` and `close`.

    An exception ends the run: model.tar is written, workers stop, and the error names the callback;
    a UsageError passes unchanged. Ctrl-C in a callback of a Learner does not end the run: the
    update remains, and the next step continues.

    Example:
        ```python
        class StopAt(Callback):
            def __init__(self, goal):
                self.goal = goal

            def on_step(self, learner, metrics):
                if learner.get_metrics()["mean_return"] >= self.goal:
                    learner.stop()
        ```
    """

    @property
    def name(self) -> str:
        """Name under which checkpoints store the callback's state; unique among a Learner's
        callbacks.
        """
        return type(self).__name__

    def on_start(self, learner: RunningLearner) -> None:
        """Runs before the first step of this process, and before the first one after `restore`.

        The state of an earlier part of the run is loaded by then.
        """

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        """Runs after every update.

        Args:
            learner: The running learner.
            metrics: The row of logs.csv, with the numbers that earlier callbacks have added.
                Numbers that you add become columns in every log.
        """

    def on_end(self, learner: RunningLearner) -> None:
        """Runs once when a run that has started ends for any reason, before model.tar is written.

        It does not run if a Learner is only forgotten, or the process is killed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as tensors and plain values; every checkpoint stores
        it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`, when a checkpoint that has one is loaded."""


class _Periodic(Callback):
    """Acts every so often, and after the last step. Multiples of steps count from the beginning of
    the run, seconds from the time before.
    """

    def __init__(self, every_steps: int | None, every_seconds: float | None) -> None:
        """Takes the one that is not None."""
        require(
            (every_steps is None) != (every_seconds is None),
            f"expected either every_steps or every_seconds, got {every_steps} and {every_seconds}",
        )
        above(0, every_steps=every_steps, every_seconds=every_seconds)
        self._every_steps, self._every_seconds = every_steps or math.inf, every_seconds or math.inf
        self._last_step, self._last_time = 0, 0.0  # also for an `on_start` that replaces ours

    def on_start(self, learner: RunningLearner) -> None:
        """Begins to wait."""
        self._mark(learner.steps)

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        """Acts if it is time."""
        if self._is_due(learner.steps) or learner.done():
            self._act(learner, metrics)
            self._mark(learner.steps)

    def _mark(self, steps: int) -> None:
        self._last_step, self._last_time = steps, time.monotonic()

    def _is_due(self, steps: int) -> bool:
        multiples = steps // self._every_steps - self._last_step // self._every_steps
        return multiples > 0 or time.monotonic() - self._last_time >= self._every_seconds

    def _act(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        raise NotImplementedError


class Checkpoints(_Periodic):
    """Writes model.tar at intervals, and keeps copies as checkpoints/STEPS.tar in log_dir.

    If a checkpoint cannot be written, for example because the disk is full, it warns and the run
    continues.

    Example:
        ```python
        Learner(scheme, 1_000_000, callbacks=[Checkpoints(every_steps=100_000, keep=3)])
        ```
    """

    def __init__(
        self,
        every_steps: int | None = None,
        *,
        every_seconds: float | None = None,
        keep: int | None = None,
    ) -> None:
        """Sets the interval: give either every_steps or every_seconds.

        Args:
            every_steps: Environment steps between checkpoints.
            every_seconds: Seconds between checkpoints.
            keep: Number of copies; older ones are removed. 0: only model.tar is written. None: all.
        """
        at_least(0, keep=keep)
        super().__init__(every_steps, every_seconds)
        self._keep = keep

    def _act(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        with failing_is_a_warning():
            learner.save_model()
            if self._keep != 0:
                self._keep_copy(learner)

    def _keep_copy(self, learner: RunningLearner) -> None:
        folder = learner.log_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        learner.save_model(folder / f"{learner.steps:012d}.tar")
        for old in _numbered(folder)[: -self._keep] if self._keep else ():
            old.unlink()


class Evaluation(_Periodic):
    """Evaluates the agent every so many steps and after the last one, and keeps the best weights:
    what EvalCallback is in Stable-Baselines3.

    An evaluation plays whole episodes with the weights of that step, in environments of its own,
    and training waits for it, as in Stable-Baselines3: its row belongs to an exact step, only the
    evaluated weights can become the best ones, and a run with a fixed lag is the same with and
    without evaluations. Workers go on collecting until their buffers are full. If evaluations take
    too long for that, evaluate the checkpoints in another process: `--mode test --follow`.

    Each evaluation adds the columns NAME_mean_return and NAME_mean_length to the log, and a row to
    NAMEs.csv in log_dir. The checkpoint with the highest mean return so far is NAME_best.tar there,
    even if the run is resumed or started over.

    Example:
        ```python
        Learner(scheme, 1_000_000, callbacks=[Evaluation(every_steps=50_000, num_episodes=10)])
        ```
    """

    def __init__(
        self,
        every_steps: int | None = None,
        *,
        every_seconds: float | None = None,
        num_episodes: int = 10,
        sampled: bool = False,
        keep_best: bool = True,
        seed: int = 0,
        name: str = checkpoints.EVALUATION,
        verbose: bool = False,
    ) -> None:
        """Sets the interval: give either every_steps or every_seconds.

        Args:
            every_steps: Environment steps between evaluations.
            every_seconds: Seconds between evaluations.
            num_episodes: Number of episodes of an evaluation.
            sampled: Whether to sample actions instead of taking the most likely ones.
            keep_best: Whether to keep the best checkpoint.
            seed: Seed of the environments. Evaluations of different runs with one seed, after the
                same number of steps, play the same starts.
            name: Prefix of the columns, and of the files' names.
            verbose: Whether to print a line about every evaluation.
        """
        at_least(1, num_episodes=num_episodes)
        super().__init__(every_steps, every_seconds)
        self.num_episodes, self._sampled, self._seed = num_episodes, sampled, seed
        self._keeps_best, self._name, self._verbose = keep_best, name, verbose
        self._best = -math.inf
        self._resumed: int | None = None  # the step from which an earlier run waited
        self._scores: Scores | None = None

    @property
    def name(self) -> str:
        """Prefix of its columns, and of the names of its files."""
        return self._name

    @property
    def best(self) -> float:
        """Mean return of the best checkpoint; -inf before the first evaluation."""
        return self._best if self._scores is None else self._scores.best

    def on_start(self, learner: RunningLearner) -> None:
        """Begins to wait. An evaluation that the end of the earlier run interrupted is due now."""
        self.on_end(learner)
        super().on_start(learner)
        if self._resumed is not None:
            self._last_step, self._resumed = min(self._resumed, learner.steps), None
        self._open(learner)

    def on_end(self, learner: RunningLearner) -> None:
        """Closes the file of scores."""
        if self._scores is not None:
            self._best = self._scores.best
            self._scores.close()
        self._scores = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the best mean return, and the step from which it waits for the next one."""
        return {checkpoints.BEST: self.best, "step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self._best, self._resumed = state.get(checkpoints.BEST, -math.inf), state.get("step")

    def _open(self, learner: RunningLearner) -> Scores:
        from torchbeast.run.scores import Scores

        self._scores = Scores(
            learner.log_dir, self._name, learner.steps, self._best, self._keeps_best
        )
        return self._scores

    def _act(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        scores = self._scores or self._open(learner)
        seed = seed_of(self._seed, self._name, learner.steps)
        played = learner.evaluate(self.num_episodes, sampled=self._sampled, seed=seed)
        self._last_step = learner.steps  # as the checkpoint records it
        from torchbeast.run.scores import weights_id_of

        weights = weights_id_of(learner.actor.state_dict(), learner.steps)
        sentence = scores.add(weights, played, learner.checkpoint)
        if self._verbose:
            say(sentence)
        metrics[f"{self._name}_mean_return"] = statistics.fmean(played.returns)
        metrics[f"{self._name}_mean_length"] = statistics.fmean(played.lengths)


# --- what a run does with them

Fail = Callable[[str, Exception], None]
"""Ends the run because of an exception of an origin, a callback."""


class Callbacks:
    """The callbacks of a run, in order. One thread at a time uses it.

    is_running: whether one of them runs now.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises UsageError unless they are callbacks with different names."""
        check_callbacks(callbacks)
        self._all = tuple(callbacks)
        self._started: list[Callback] = []
        self.is_running = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def load(self, states: Mapping[str, Any]) -> None:
        """Loads the states of an earlier part of the run; `start` will call all of them."""
        self._started = []
        for callback in self._all:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])

    def entries(self, env_options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a checkpoint: the states by name, and those of `env_options`.

        Raises UsageError for a state that no checkpoint could be loaded with.
        """
        states = {callback.name: callback.state_dict() for callback in self._all}
        for name, state in states.items():
            _check_loads(name, state)
        return {"callbacks": states, **env_options}

    def start(self, learner: RunningLearner, fail: Fail) -> None:
        """Calls on_start of those for which it was not called yet."""
        for callback in self._all[len(self._started) :]:
            with self._running(callback, fail):
                callback.on_start(learner)
            self._started.append(callback)

    def step(self, learner: RunningLearner, metrics: dict[str, float], fail: Fail) -> None:
        """Calls on_step; metrics: the row of the log."""
        for callback in self._all:
            with self._running(callback, fail):
                try:
                    callback.on_step(learner, metrics)
                finally:
                    keep_numbers(metrics)

    def end(self, learner: RunningLearner, fail: Fail) -> None:
        """Calls on_end of those that have started, even if one fails."""
        for callback in self._started:
            try:
                callback.on_end(learner)
            except Exception as error:
                fail(f"callback {callback.name}", error)

    @contextmanager
    def _running(self, callback: Callback, fail: Fail) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        except Exception as error:
            fail(f"callback {callback.name}", error)
            raise
        finally:
            self.is_running = False


class LearnerWithCallbacks(RunningLearner):
    """A learner that trains, and calls its callbacks."""

    _callbacks: Callbacks

    def _hold(self, earlier: EarlierRun, training: Training) -> None:
        """Takes a run that is assembled; earlier: its earlier part."""
        self._training = training
        self._is_stopped = False
        self._callbacks.load(earlier.callbacks)
        if (recorded := earlier.env_options) is not None:
            self._env_options["env_options"] = recorded
        if self._env_options:
            training.source.set_env_options(self._env_options["env_options"])

    def _start_callbacks(self) -> None:
        """Calls on_start of callbacks that have not started."""
        self._callbacks.start(self, self._training.supervisor.fail)

    def _call_back(self, step: int, row: dict[str, float]) -> None:
        """Calls on_step of the callbacks, with the row of an update."""
        self._callbacks.step(self, row, self._training.supervisor.fail)

    def _end_callbacks(self) -> None:
        """Calls on_end; the first failure is the run's, unless it has one."""
        self._callbacks.end(self, self._training.supervisor.fail_at_end)


class ProgramLearner(LearnerWithCallbacks):
    """A program's learner, and what it does with its callbacks.

    Environments of evaluations run in a child process, made for the first evaluation and kept, so
    that their code and random numbers do not touch the learner's.
    """

    def __init__(
        self, make_envs: Callable[[int], EnvProcess], target_steps: int, callbacks: Callbacks
    ) -> None:
        """Takes what there is before training; `begin` takes the rest.

        make_envs: makes that many environments for evaluations.
        """
        self._make_envs, self.target_steps, self._callbacks = make_envs, target_steps, callbacks
        self._env_options = {}
        self._env: EnvProcess | None = None
        self._num_episodes = 0  # for which the environments were made

    def prepare(self) -> None:
        """Makes the environments of an Evaluation, if there is one.

        Raises UsageError or RunError if they cannot be made on this machine.
        """
        numbers = [call.num_episodes for call in self._callbacks if isinstance(call, Evaluation)]
        if numbers:
            self._envs_for(numbers[0])

    def begin(self, earlier: EarlierRun, training: Training) -> None:
        """Loads the state of the earlier run, and calls on_start."""
        self._hold(earlier, training)
        self._start_callbacks()

    def step(self, step: int, row: dict[str, float]) -> None:
        """Calls on_step, and ends the run if a callback has stopped it."""
        self._call_back(step, row)
        supervisor = self._training.supervisor
        if self._is_stopped and not supervisor.ended:
            say(f"A callback stopped the run at step {step:,}.")
            supervisor.stop("a callback")

    def end(self) -> None:
        """Calls on_end; the first failure is the run's, unless it has one."""
        self._end_callbacks()

    def saved(self) -> dict[str, Any]:
        """Returns the entries of the callbacks in a checkpoint."""
        return self._callbacks.entries(self._env_options)

    @contextmanager
    def _test_envs(self, num_episodes: int) -> Iterator[VecEnv]:
        yield self._envs_for(num_episodes)

    def _envs_for(self, num_episodes: int) -> EnvProcess:
        if self._env is None or self._num_episodes != num_episodes:
            from torchbeast.run.episodes import of_whole_games

            self.close()
            self._env = of_whole_games(self._make_envs, num_episodes)
            self._num_episodes = num_episodes
        return self._env

    def close(self) -> None:
        """Ends the environments' process."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


def of_config(config: CallbacksConfig, keep_best: bool) -> list[Callback]:
    """Makes the callbacks of a program: those that are named, then the evaluation.

    keep_best: see Evaluation. Raises UsageError if there is no callback of a name.
    """
    callbacks = [_named(path) for path in config.callback]
    if config.eval_every is None:
        return callbacks
    evaluation = Evaluation(
        config.eval_every, num_episodes=config.eval_episodes, keep_best=keep_best, verbose=True
    )
    return [*callbacks, evaluation]


def _named(path: str) -> Callback:
    make = specs.find_callable(path)
    specs.check_takes(make, {}, f"callback {path}")
    callback = make()
    if not isinstance(callback, Callback):
        raise UsageError(
            f"callback {path} is a {type(callback).__name__}: expected a subclass of "
            "torchbeast.learner.Callback, or a function that returns a callback"
        )
    return callback


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises UsageError unless all are callbacks, each with a different name."""
    if not isinstance(callbacks, Sequence):
        raise UsageError(
            f"callbacks must be a list of callbacks, got {callbacks!r}: write callbacks=[...]"
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = f", write {callback.__name__}()" if isinstance(callback, type) else ""
            raise UsageError(
                f"callbacks must be objects of subclasses of Callback, got {callback!r}{hint}"
            )
    counted = Counter(callback.name for callback in callbacks)
    if again := [name for name, count in counted.items() if count > 1]:
        raise UsageError(
            f"several callbacks have the name {again[0]!r}. Checkpoints store the state of "
            "callbacks by name: use a different name for each"
        )


def keep_numbers(metrics: dict[str, Any]) -> None:
    """Makes all metrics plain numbers, for example a tensor's.

    Removes metrics that are not numbers, because no log could write them, and raises ValueError.
    """
    wrong = {name: metrics.pop(name) for name in [*metrics] if not _is_number(metrics[name])}
    others = {k: float(v) for k, v in metrics.items() if not isinstance(v, int | float)}
    metrics.update(others)
    for name, value in wrong.items():
        raise ValueError(f"metrics[{name!r}] must be a number, got {value!r}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return False
    return not isinstance(value, str | bytes)


def _check_loads(name: str, state: Any) -> None:
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise UsageError(
            f"the state_dict of callback {name} may contain only tensors and plain values, like "
            f"all entries of a checkpoint: {str(error).splitlines()[0]}"
        ) from error


def _numbered(folder: Path) -> list[Path]:
    """Returns the copies, in the order of their steps."""
    return sorted((p for p in folder.glob("*.tar") if p.stem.isdigit()), key=lambda p: int(p.stem))
