# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what a run calls between its updates, and the learner that they get. A `Learner` takes
them as `callbacks=[...]`, the programs as `--callback` and `--eval_every`.

    a step of the run    collect, learn, publish --> on_step of each --> the row of logs.csv
          first time:    on_start of each, before
          last time:     on_end of each, after, and then model.tar

They are called one after the other in the order of their list, and never during an update: by a
Learner in the thread that calls its own methods, by a program in its main thread (on_start and
on_end) and in its learner threads (on_step).
"""

from __future__ import annotations

import copy
import io
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.actors.contract import Actor
from torchbeast.core.base.checks import at_least
from torchbeast.core.base.computing import numpys_scalars
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.env_process import EnvProcess
from torchbeast.errors import UsageError, expanded
from torchbeast.fleets.supervisor import RunEnded
from torchbeast.fleets.waiting import say, warn
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.episodes import Episodes, of_whole_games, play
from torchbeast.run.training import ENOUGH, Training


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
            metrics: The row of logs.csv without step (see learner.steps), _tick and _time, with the
                numbers that earlier callbacks have added. Numbers that you add become columns in
                every log.
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

    def _is_due(self, state: Mapping[str, Any], step: int) -> bool:
        """Returns whether the end of a run at its last step interrupted it; state: its own then."""
        return False

    def _on_stop(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        """Runs after every `on_step` of an update in which a callback has stopped the run."""

    def _prepare_evaluations(self, make_envs: Callable[[int], object]) -> None:
        """Lets a program make environments for a number of episodes, before it records its run."""


class RunningLearner:
    """A learner that trains: what callbacks get, a `Learner` or the learner of a program.

    Attributes:
        target_steps: Environment steps at which the run ends.

    Example:
        ```python
        class StopAt(Callback):
            def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
                if learner.get_metrics()["mean_return"] >= 475:
                    learner.stop()
        ```
    """

    target_steps: int
    _training: Training
    _is_stopped: bool
    _callbacks: Callbacks

    @property
    def log_dir(self) -> Path:
        """Folder of the run."""
        return self._training.writer.folder.path

    @property
    def steps(self) -> int:
        """Environment steps that the agent was trained on, including earlier parts of the run."""
        return self._training.progress.step

    @property
    def updates(self) -> int:
        """Number of updates, including earlier parts of the run."""
        return self._training.updates

    @property
    def actor(self) -> Actor:
        """The network that is trained, with its present weights; call `actor.act` to choose
        actions.
        """
        return self._training.made.agent.model

    def done(self) -> bool:
        """Returns whether the agent was trained on target_steps, or `stop` was called."""
        return self._is_stopped or self.steps >= self.target_steps

    def stop(self) -> None:
        """Ends the run after the present step and, with Evaluation, a last evaluation.

        For callbacks; elsewhere call the Learner's `close`.
        """
        self._is_stopped = True

    def get_metrics(self) -> dict[str, float]:
        """Returns the metrics of the last update and of the run so far.

        Returns:
            The columns of the last row of logs.csv, including the metrics of callbacks; and step,
            updates, episodes, steps_per_second since the Learner was made, and mean_return and
            mean_length (in steps) of the last 100 episodes, which are NaN before the first episode
            ends.
        """
        progress = self._training.progress
        return {
            **self._training.rows.newest,
            "step": self.steps,
            "updates": self.updates,
            "episodes": progress.episodes,
            "mean_return": progress.mean_return(),
            "mean_length": progress.mean_length(),
            "steps_per_second": self._training.rows.speed(),
        }

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives every training environment options, such as the level of a curriculum.

        An environment gets them when it is reset the next time, `reset(options=...)`, and at every
        reset after it until you give others, also after the run is resumed. The environments of
        `evaluate` do not get them.

        Args:
            options: Names and values, as JSON has them.

        Raises:
            TypeError: If the options are not JSON.
            UsageError: If the environments do not take options, or gradient workers have them.
                Environments in other processes may report it later, from `step`.

        Example:
            ```python
            class Curriculum(Callback):
                def on_step(self, learner, metrics):
                    learner.set_env_options({"level": learner.steps // 100_000})
            ```
        """
        plain: dict[str, Any] = json.loads(json.dumps(dict(options)))  # also where it is an enum
        self._training.source.set_env_options(plain)
        self._callbacks.env_options = plain

    def print_info(self) -> None:
        """Prints a line about the run: steps, steps per second, episodes, mean return and loss."""
        print(self._info(), flush=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._info()}>"

    def _info(self) -> str:
        metrics = self.get_metrics()
        share = 100 * self.steps / self.target_steps
        parts = [
            f"step {self.steps:,} of {self.target_steps:,} ({share:.0f} %)",
            f"{metrics['steps_per_second']:,.0f} steps/s",
            f"{self._training.progress.episodes:,} episodes",
        ]
        if not math.isnan(metrics["mean_return"]):
            parts.append(f"mean return {metrics['mean_return']:.2f}")
        if (loss := metrics.get("total_loss")) is not None:
            parts.append(f"loss {loss:.3g}")
        return ", ".join(parts)

    def save_model(self, path: str | Path | None = None) -> Path:
        """Writes a checkpoint from which a run can continue.

        Args:
            path: Default: model.tar in log_dir, which is also written every ten minutes and at the
                end of the run.

        Returns:
            The path of the file.
        """
        writer = self._training.writer
        if path is None:
            writer.save(self.checkpoint)
            return writer.folder.checkpoint
        target = expanded(path)
        checkpoints.save(target, self.checkpoint())
        return target

    def checkpoint(self) -> dict[str, Any]:
        """Returns the contents of a checkpoint from which a run can continue, without a file."""
        return self._training.checkpoint()

    def evaluate(
        self, num_episodes: int = 10, *, sampled: bool = False, seed: int | None = None
    ) -> Episodes:
        """Plays whole episodes with the present weights.

        A Learner's environments come from the scheme's test_envs_factory, or else its
        train_envs_factory. A program plays in the environment of the run, in a separate process.

        Args:
            num_episodes: Number of episodes; with several tasks, of each.
            sampled: Whether to sample actions, as in training, instead of taking the most likely
                ones.
            seed: Seed of environments and sampled actions. Default: a random one.

        Returns:
            Returns, lengths in steps and fingerprints of the endings, one per episode; see
            `Episodes`.

        Raises:
            ValueError: If num_episodes is below 1.
            RunError: If an episode takes more than 500,000 steps.

        Example:
            ```python
            learner.evaluate(10, seed=1)  # <10 episodes: mean return 500.00 ± 0.00, ...>
            ```
        """
        at_least(1, num_episodes=num_episodes)
        seed = secrets.randbits(31) if seed is None else seed
        model = copy.deepcopy(self.actor).to("cpu").eval()
        model.set_precision(self._training.made.compute.precision, torch.device("cpu"))
        of_run = torch.random.fork_rng(devices=[])  # code of the environments may set a seed
        with self._training.own, of_run, self._test_envs(num_episodes) as env:
            agent = self._training.made.agent._replace(model=model)
            return play(env, agent, num_episodes, seed, greedy=not sampled)

    def _test_envs(self, num_episodes: int) -> AbstractContextManager[VecEnv]:
        """Makes the environments of an evaluation."""
        raise NotImplementedError

    # --- the run

    def _hold(self, earlier: EarlierRun, training: Training) -> None:
        """Takes a run that is assembled; earlier: its earlier part."""
        self._training = training
        self._is_stopped = False
        self._callbacks.load(earlier, training)


class Callbacks:
    """The callbacks of a run, in order, and what checkpoints store for them. One thread at a time
    uses it. If a callback fails, the run does.

    is_running: whether one of them runs now. env_options: that the environments were given last.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises UsageError unless all are callbacks, each with a different name."""
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
        self._all = tuple(callbacks)
        self._started: list[Callback] = []
        self.is_running = False
        self.env_options: Mapping[str, Any] | None = None

    def prepare(self, make_envs: Callable[[int], object]) -> None:
        """Makes the environments of evaluations; make_envs: for a number of episodes."""
        for callback in self._all:
            callback._prepare_evaluations(make_envs)

    def are_due(self, earlier: EarlierRun, step: int) -> bool:
        """Returns whether one was interrupted at the last step of the earlier run."""
        states = earlier.callbacks
        return any(callback._is_due(states.get(callback.name, {}), step) for callback in self._all)

    def load(self, earlier: EarlierRun, training: Training) -> None:
        """Loads the states of the earlier run, and gives the environments of this one its options;
        `start` will call all callbacks.
        """
        self._started, self._supervisor, states = [], training.supervisor, earlier.callbacks
        for callback in self._all:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])
        self._states = dict(states)
        if earlier.recorded:
            self.env_options = earlier.env_options
        if self.env_options is not None:
            training.source.set_env_options(self.env_options)

    def entries(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint: the states by name, and env_options.

        Raises UsageError for a state that no checkpoint could be loaded with.
        """
        for callback in self._all:
            self._states[callback.name] = callback.state_dict()
            _check_loads(callback.name, self._states[callback.name])
        options = {} if self.env_options is None else {"env_options": self.env_options}
        return {"callbacks": dict(self._states), **options}

    def start(self, learner: RunningLearner) -> None:
        """Calls on_start of those for which it was not called yet."""
        for callback in self._all[len(self._started) :]:
            with self._running(callback):
                callback.on_start(learner)
            self._started.append(callback)

    def step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        """Calls on_step, and _on_stop if one of them has stopped the run; metrics: the row of the
        log.
        """
        was_done = learner.done()
        self._each(lambda callback: callback.on_step(learner, metrics), metrics)
        if learner.done() and not was_done:
            self._each(lambda callback: callback._on_stop(learner, metrics), metrics)

    def _each(self, call: Callable[[Callback], object], metrics: dict[str, float]) -> None:
        for callback in self._all:
            with self._running(callback):
                try:
                    call(callback)
                finally:
                    keep_numbers(metrics)

    def end(self, learner: RunningLearner) -> None:
        """Calls on_end of those that have started, even if one fails. The first failure is the
        run's, unless it has one.
        """
        with ExitStack() as last:  # in reverse order; an interrupt of one leaves out no other
            for callback in reversed(self._started):
                last.callback(self._end_one, callback, learner)

    def _end_one(self, callback: Callback, learner: RunningLearner) -> None:
        try:
            callback.on_end(learner)
        except RunEnded as error:  # a signal or failure has ended what it waited for
            if self._supervisor.failure is None:
                warn(f"on_end of callback {callback.name} was not completed: {error}")
        except (Exception, SystemExit) as error:
            self._supervisor.fail_at_end(f"callback {callback.name}", error)

    @contextmanager
    def _running(self, callback: Callback) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        except Exception as error:
            self._supervisor.fail(f"callback {callback.name}", error)
            raise
        finally:
            self.is_running = False


class ProgramLearner(RunningLearner):
    """A program's learner, and what it does with its callbacks.

    Environments of evaluations run in a child process, made for the first evaluation and kept, so
    that their code and random numbers do not touch the learner's.
    """

    def __init__(
        self, make_envs: Callable[[int], EnvProcess], target_steps: int, callbacks: Callbacks
    ) -> None:
        """Makes the environments of evaluations that are known already; `begin` takes the rest.

        make_envs: makes that many environments. Raises UsageError or RunError if they cannot be
        made on this machine.
        """
        self._make_envs, self.target_steps, self._callbacks = make_envs, target_steps, callbacks
        self._env: EnvProcess | None = None
        self._num_episodes = 0  # for which the environments were made
        callbacks.prepare(self._envs_for)

    def begin(self, earlier: EarlierRun, training: Training) -> None:
        """Loads the state of the earlier run, and calls on_start."""
        self._hold(earlier, training)
        self._callbacks.start(self)

    def step(self, step: int, row: dict[str, float]) -> None:
        """Calls on_step, and ends the run if a callback has stopped it."""
        self._callbacks.step(self, row)
        supervisor = self._training.supervisor
        if self._is_stopped and not supervisor.ended:
            say(f"A callback stopped the run at step {step:,}.")
            supervisor.stop(ENOUGH)

    def end(self) -> None:
        """Calls on_end."""
        self._callbacks.end(self)

    def _test_envs(self, num_episodes: int) -> AbstractContextManager[VecEnv]:
        return nullcontext(self._envs_for(num_episodes))

    def _envs_for(self, num_episodes: int) -> EnvProcess:
        if self._env is None or self._env.has_failed or self._num_episodes != num_episodes:
            self.close()
            self._env = of_whole_games(self._make_envs, num_episodes)
            self._num_episodes = num_episodes
        return self._env

    def close(self) -> None:
        """Ends the environments' process."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


def keep_numbers(metrics: dict[str, Any]) -> None:
    """Makes all metrics plain numbers, for example a tensor's.

    Removes metrics that are not numbers, because no log could write them, and raises ValueError.
    """
    wrong = {}
    for name, value in [*metrics.items()]:
        try:
            metrics[name] = value if type(value) in (int, float) else float(value)
        except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers: RuntimeError
            wrong[name] = metrics.pop(name)
    for name, value in wrong.items():
        raise ValueError(f"metrics[{name!r}] must be a number, got {value!r}")


def _check_loads(name: str, state: Any) -> None:
    try:
        data = io.BytesIO(checkpoints.as_bytes({"state": state}))
        with numpys_scalars():  # as `checkpoint.load`
            torch.load(data, weights_only=True)
    except Exception as error:
        raise UsageError(
            f"the state_dict of callback {name} may contain only tensors and plain values, like "
            f"all entries of a checkpoint: {str(error).splitlines()[0]}"
        ) from error
