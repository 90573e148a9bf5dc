# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what a Learner calls between its steps, and the built-in ones.

    Learner.step()    collect, learn, publish --> on_step of each --> the row of logs.csv
         first time:  on_start of each, before
         last time:   on_end of each, after, and then model.tar

A Learner calls them in the process and thread that calls its own methods, one after the other in
the order of its list, and never during an update.
"""

from __future__ import annotations

import io
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchbeast.core.base.checks import above, at_least, require
from torchbeast.errors import UsageError
from torchbeast.reporting.log_files import Logger
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.saving import CheckpointNotWritten
from torchbeast.seeds import seed_of

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner

_log = logging.getLogger("torchbeast.learner")


class Callback:
    """Base class of callbacks: what a Learner does between its steps. Override what you need.

    A callback may use the Learner that it is given, except `step`, `train`, `restore` and `close`;
    `Learner.stop` ends the run after the present step.

    An exception ends the run: model.tar is written, workers stop, and `Learner.step` raises a
    RunError that names the callback; a UsageError passes unchanged. Ctrl-C in a callback does not
    end the run: the update remains, and the next step continues.

    Example:
        ```python
        class StopAt(Callback):
            def __init__(self, goal):
                self.goal = goal

            def on_step(self, learner, figures):
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

    def on_start(self, learner: Learner) -> None:
        """Runs before the first step of a Learner, and before the first step after `restore`.

        The state of an earlier part of the run is loaded by then.
        """

    def on_step(self, learner: Learner, figures: dict[str, float]) -> None:
        """Runs after every update.

        Args:
            learner: The Learner.
            figures: The row of logs.csv, with the numbers that earlier callbacks have added.
                Numbers that you add become columns in every log.
        """

    def on_end(self, learner: Learner) -> None:
        """Runs once when a run that has started ends for any reason, before model.tar is written.

        It does not run if a Learner is only forgotten, or its process ends.
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
            f"give either every_steps or every_seconds, got {every_steps} and {every_seconds}",
        )
        above(0, every_steps=every_steps, every_seconds=every_seconds)
        self._every_steps, self._every_seconds = every_steps or math.inf, every_seconds or math.inf
        self._last_step, self._last_time = 0, 0.0  # also for an `on_start` that replaces ours

    def on_start(self, learner: Learner) -> None:
        """Begins to wait."""
        self._mark(learner.steps)

    def on_step(self, learner: Learner, figures: dict[str, float]) -> None:
        """Acts if it is time."""
        if self._is_due(learner.steps) or learner.done():
            self._act(learner, figures)
            self._mark(learner.steps)

    def _mark(self, steps: int) -> None:
        self._last_step, self._last_time = steps, time.monotonic()

    def _is_due(self, steps: int) -> bool:
        multiples = steps // self._every_steps - self._last_step // self._every_steps
        return multiples > 0 or time.monotonic() - self._last_time >= self._every_seconds

    def _act(self, learner: Learner, figures: dict[str, float]) -> None:
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

    def _act(self, learner: Learner, figures: dict[str, float]) -> None:
        try:
            self._write(learner)
        except (CheckpointNotWritten, OSError) as error:
            _log.warning("%s; the run continues", error)

    def _write(self, learner: Learner) -> None:
        learner.save_model()
        if self._keep == 0:
            return
        folder = learner.log_dir / "checkpoints"
        folder.mkdir(exist_ok=True)
        learner.save_model(folder / f"{learner.steps:012d}.tar")
        for old in _numbered(folder)[: -self._keep] if self._keep else ():
            old.unlink()


class Evaluation(_Periodic):
    """Evaluates the agent at intervals and after the last step, and keeps the best checkpoint.

    It adds the columns NAME_mean_return and NAME_mean_length. The checkpoint with the highest mean
    return so far is NAME_best.tar in log_dir, even if the run is resumed or started over there.

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
            name: Prefix of the columns, and of the file's name.
        """
        at_least(1, num_episodes=num_episodes)
        self.best = -math.inf  # mean return of the best checkpoint
        super().__init__(every_steps, every_seconds)
        self._num_episodes, self._sampled = num_episodes, sampled
        self._keeps_best, self._seed, self._name = keep_best, seed, name

    @property
    def name(self) -> str:
        """Prefix of its columns, and of the name of its file."""
        return self._name

    def on_start(self, learner: Learner) -> None:
        """Begins to wait; a checkpoint that is kept may be better than any of this run."""
        super().on_start(learner)
        if self._keeps_best:
            self.best = max(self.best, checkpoints.kept_score(learner.log_dir, self._name))

    def state_dict(self) -> dict[str, Any]:
        """Returns the best mean return."""
        return {checkpoints.BEST: self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.best = state.get(checkpoints.BEST, -math.inf)

    def _act(self, learner: Learner, figures: dict[str, float]) -> None:
        seed = seed_of(self._seed, self._name, learner.steps)
        played = learner.evaluate(self._num_episodes, sampled=self._sampled, seed=seed)
        score = statistics.fmean(played.returns)
        if score > self.best:
            self._keep(learner, score)
        figures[f"{self._name}_mean_return"] = score
        figures[f"{self._name}_mean_length"] = statistics.fmean(played.lengths)

    def _keep(self, learner: Learner, score: float) -> None:
        before, self.best = self.best, score  # the checkpoint says how good it is
        try:
            if self._keeps_best:
                learner.save_model(checkpoints.best_path(learner.log_dir, self._name))
        except OSError as error:
            self.best = before
            _log.warning("the best checkpoint was not written (%s); the run continues", error)


# --- what a Learner does with them


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises UsageError unless they are a sequence of callbacks, each with a different name."""
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
        _check_methods(callback)
    counted = Counter(callback.name for callback in callbacks)
    if again := [name for name, count in counted.items() if count > 1]:
        raise UsageError(
            f"several callbacks are named {again[0]!r}. Checkpoints store the state of callbacks "
            "by name: give each its own name"
        )


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Raises UsageError unless they are a sequence of loggers."""
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise UsageError(f"loggers must be a list of loggers, got {loggers!r}")
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "open", None)):
            raise UsageError(
                "loggers must be objects with a method open(run), such as "
                f"torchbeast.reporting.StdoutLogger(...), got {logger!r}"
            )


def _check_methods(callback: Callback) -> None:
    """Raises UsageError for a method that looks like one of a callback's, which nothing calls."""
    called = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in called:
            raise UsageError(
                f"callback {type(callback).__name__} has a method {name} that is never called: a "
                f"Learner calls {', '.join(called)}. Correct its name, or do not begin it with on_"
            )


def keep_numbers(figures: dict[str, Any]) -> None:
    """Makes all figures plain numbers, for example a tensor's.

    Removes figures that are not numbers, because no log could write them, and raises ValueError.
    """
    wrong = {name: figures.pop(name) for name in [*figures] if not _is_number(figures[name])}
    others = {k: float(v) for k, v in figures.items() if not isinstance(v, int | float)}
    figures.update(others)
    for name, value in wrong.items():
        raise ValueError(f"figures[{name!r}] must be a number, got {value!r}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return False
    return not isinstance(value, str | bytes)


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Returns the states by name, for a checkpoint.

    Raises UsageError for one that no checkpoint could be loaded with.
    """
    states = {callback.name: callback.state_dict() for callback in callbacks}
    for name, state in states.items():
        _check_loads(name, state)
    return states


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
