# SPDX-License-Identifier: Apache-2.0
"""Callbacks that act every so often: checkpoints, and evaluations with their scores.

The scores of a run's evaluations are in evaluations.csv, and evaluation_best.tar is the best
checkpoint. Its entry callbacks["evaluation"]["best"] is its mean return, so that only a better
checkpoint replaces it. It is kept before the row is written. If the process is killed in between,
the checkpoint is evaluated again when the evaluation is resumed.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.base import specs
from torchbeast.core.base.checks import above, at_least, require
from torchbeast.errors import UsageError, refusing_paths
from torchbeast.fleets.waiting import say, warn
from torchbeast.reporting.log_files import AppendedFile, WallTime, csv_line, drop_after, read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.callbacks import Callback, RunningLearner
from torchbeast.run.checkpoint_writer import failing_is_a_warning
from torchbeast.run.config import CallbacksConfig
from torchbeast.run.episodes import Episodes
from torchbeast.seeds import seed_of

EVALUATION = "evaluation"
BEST = "best"


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
        multiples = learner.steps // self._every_steps - self._last_step // self._every_steps
        is_time = time.monotonic() - self._last_time >= self._every_seconds
        if multiples > 0 or is_time or learner.done():
            self._act(learner, metrics)
            self._mark(learner.steps)

    def _on_stop(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        if self._last_step != learner.steps:  # else it has acted already
            self.on_step(learner, metrics)

    def _mark(self, steps: int) -> None:
        self._last_step, self._last_time = steps, time.monotonic()

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
        copies = [path for path in folder.glob("*.tar") if path.stem.isdigit()]
        # not those of steps from which the run went back
        copies = [path for path in copies if int(path.stem) <= learner.steps]
        copies.sort(key=lambda path: int(path.stem))
        for old in copies[: -self._keep] if self._keep else ():
            old.unlink()


class Evaluation(_Periodic):
    """Evaluates the agent every so many steps and after the last one, and keeps the best weights:
    what EvalCallback is in Stable-Baselines3.

    An evaluation plays whole episodes with the weights of that step, in separate environments,
    and training waits for it, as in Stable-Baselines3: its row belongs to an exact step, only the
    evaluated weights can become the best ones, and a run with a fixed lag is the same with and
    without evaluations. Workers go on collecting until their buffers are full. If evaluations take
    too long for that, evaluate the checkpoints in another process: `--mode test --follow`.

    Each evaluation adds the columns NAME_mean_return and NAME_mean_length to the log, and a row to
    NAMEs.csv in log_dir. The checkpoint with the highest mean return so far is NAME_best.tar there,
    even if the run is resumed or started over.

    Attributes:
        best: Mean return of the best checkpoint; -inf before the first evaluation.

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
        seed: int | None = 0,
        name: str = EVALUATION,
        verbose: bool = False,
    ) -> None:
        """Sets the interval: give either every_steps or every_seconds.

        Args:
            every_steps: Environment steps between evaluations.
            every_seconds: Seconds between evaluations.
            num_episodes: Number of episodes of an evaluation; with several tasks, of each.
            sampled: Whether to sample actions instead of taking the most likely ones.
            keep_best: Whether to keep the best checkpoint.
            seed: Seed of the environments. Evaluations of different runs with one seed, after the
                same number of steps, play the same starts. None: the seed of the run.
            name: Prefix of the columns, and of the files' names.
            verbose: Whether to print a line about every evaluation.
        """
        at_least(1, num_episodes=num_episodes)
        super().__init__(every_steps, every_seconds)
        self.num_episodes, self._sampled, self._seed = num_episodes, sampled, seed
        self._keeps_best, self._name, self._verbose = keep_best, name, verbose
        self.best = -math.inf
        self._resumed: int | None = None  # the step from which an earlier run waited
        self._scores: Scores | None = None

    @property
    def name(self) -> str:
        """Prefix of its columns, and of the names of its files."""
        return self._name

    def on_start(self, learner: RunningLearner) -> None:
        """Begins to wait. An evaluation that the end of the earlier run interrupted is due now. A
        program plays it here if no step is left.
        """
        self.on_end(learner)
        super().on_start(learner)
        if self._resumed is None:
            self.best = -math.inf  # it may have been used for another run
        else:
            self._last_step, self._resumed = min(self._resumed, learner.steps), None
        self._open(learner)
        if self._last_step < learner.steps >= learner.target_steps:
            self._act(learner, {})

    def on_end(self, learner: RunningLearner) -> None:
        """Closes the file of scores."""
        if self._scores is not None:
            self._scores.close()
        self._scores = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the best mean return, and the step from which it waits for the next one."""
        return {BEST: self.best, "step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.best, self._resumed = state.get(BEST, -math.inf), state.get("step")

    def _is_due(self, state: Mapping[str, Any], step: int) -> bool:
        return bool(state.get("step", step) < step)

    def _prepare_evaluations(self, make_envs: Callable[[int], object]) -> None:
        make_envs(self.num_episodes)

    def _open(self, learner: RunningLearner) -> Scores:
        self._scores = Scores(
            learner.log_dir, self._name, learner.steps, self.best, self._keeps_best
        )
        self.best = self._scores.best
        return self._scores

    def _act(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        scores = self._scores or self._open(learner)
        of_run: int = learner._training.writer.labels["flags"]["seed"]
        root = of_run if self._seed is None else self._seed
        seed = seed_of(root, self._name, learner.steps)
        played = learner.evaluate(self.num_episodes, sampled=self._sampled, seed=seed)
        self._last_step = learner.steps  # as the checkpoint records it
        weights = weights_id_of(learner.actor.state_dict(), learner.steps)
        sentence = scores.add(weights, played, learner.checkpoint)
        self.best = scores.best
        if self._verbose:
            say(sentence)
        metrics[f"{self._name}_mean_return"] = played.mean
        metrics[f"{self._name}_mean_length"] = statistics.fmean(played.lengths)


def of_config(config: CallbacksConfig, keep_best: bool) -> list[Callback]:
    """Makes the callbacks of a program: the evaluation, then those that are named, which see its
    metrics.

    keep_best: see Evaluation. Raises UsageError if a named callback does not exist.
    """
    callbacks = [_named(path) for path in config.callback]
    if config.eval_every is None:
        return callbacks
    evaluation = Evaluation(
        config.eval_every,
        num_episodes=config.eval_episodes,
        keep_best=keep_best,
        seed=None,  # so that an interval over runs contains the chance of the starts
        verbose=True,
    )
    return [evaluation, *callbacks]


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


COLUMNS = (
    *("_time", "step", "weights_crc32", "num_episodes", "distinct_episodes"),
    *("mean_episode_return", "min_return", "max_return", "mean_episode_length"),
)


WeightsId = tuple[int, int]
"""Learnt env steps and a CRC of the weights, which together identify the weights of a run.

A run that does not progress writes the same weights again. A run that went back to an earlier
checkpoint writes different weights after the same number of steps.
"""


def weights_id_of(state: Mapping[str, torch.Tensor], step: int) -> WeightsId:
    """Returns the identity of a network's weights, its state dict, after `step` env steps."""
    crc32 = 0
    for _, tensor in sorted(state.items()):
        data: Any = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        crc32 = zlib.crc32(data, crc32)
    return step, crc32


class Scores:
    """Appends rows to NAMEs.csv, and keeps the best checkpoint as NAME_best.tar.

    Used by one process at a time, and by one thread of it.

    best: mean return of the best checkpoint, -inf without one.
    """

    def __init__(
        self,
        folder: Path,
        name: str = EVALUATION,
        step: float = math.inf,
        best: float = -math.inf,
        keeps_best: bool = True,
    ) -> None:
        """Opens the file in a run's folder, or makes it.

        step: env steps of the checkpoint that the run resumes; later rows are dropped, as in
        logs.csv. best: of earlier evaluations; used if no checkpoint is kept. Raises UsageError if
        the file cannot be written, or if another process uses it, and as `checkpoint.load`.
        """
        self._name, self._keeps_best = name, keeps_best
        self._best_path = folder / f"{name}_best.tar"
        self.best = -math.inf if keeps_best else best
        if keeps_best and self._best_path.exists():
            try:
                kept = checkpoints.load(self._best_path, needed=())
            except checkpoints.Damaged as error:
                warn(f"{error.path} is damaged ({error.reason}); the next evaluation replaces it")
                kept = {}
            self.best = float(kept.get("callbacks", {}).get(name, {}).get(BEST, -math.inf))
        self._path = folder / f"{name}s.csv"
        with closing(self._locked()):
            drop_after(self._path, step, COLUMNS)  # may replace the file
        self._file = self._locked()
        rows = [row for row in read_logs(self._path) if len(row) == len(COLUMNS)]
        self._known = {(int(row["step"]), int(row["weights_crc32"])) for row in rows}
        self._time = WallTime(at_least=rows[-1]["_time"] if rows else -math.inf)

    def _locked(self) -> AppendedFile:
        with refusing_paths("make it writable"):
            file = AppendedFile(self._path)
        if not file.lock():
            file.close()
            raise UsageError(
                f"another process is evaluating this run and writing {self._path}: stop it; use "
                "either --mode test --follow or evaluations during training, not both"
            )
        return file

    def knows(self, weights: WeightsId) -> bool:
        """Returns whether the weights have been evaluated."""
        return weights in self._known

    def add(
        self, weights: WeightsId, played: Episodes, checkpoint: Callable[[], Mapping[str, Any]]
    ) -> str:
        """Keeps the checkpoint if it is the best, and appends a row; returns a message about it.

        Files that cannot be written are a warning. checkpoint: returns the weights' checkpoint;
        called if it is kept.
        """
        returns, lengths = played.returns, played.lengths
        result = f"mean return {played.mean:.2f} (min {min(returns):g}, max {max(returns):g})"
        if played.scores is not None:  # of tasks whose returns are on other scales
            result = f"score {played.mean:.3f}"
        message = (
            f"Step {weights[0]:,}: {result}; mean length {statistics.fmean(lengths):.0f}; "
            f"{played.distinct} of {len(returns)} episodes unique"
        )
        message += "".join(f"; {task} {value:.2f}" for task, value in played.task_means().items())
        if self._keep(played.mean, checkpoint):
            message += f"; new best, saved as {self._name}_best.tar"
        self._known.add(weights)  # even if writing fails: they are not played again
        row = [round(self._time.now(), 3), *weights, len(returns), played.distinct]
        row += [played.mean, min(returns), max(returns), statistics.fmean(lengths)]
        try:
            heading = "" if self._file.size else csv_line(COLUMNS)
            self._file.append(heading + csv_line(row))
        except OSError as error:
            warn(f"no row was written to {self._path.name} ({error.strerror})")
        return message

    def _keep(self, score: float, checkpoint: Callable[[], Mapping[str, Any]]) -> bool:
        """Keeps a checkpoint if its score is the highest; returns whether it did."""
        if not score > self.best:  # nor is NaN
            return False
        if self._keeps_best:
            try:
                saved = checkpoint()
                states = saved.get("callbacks", {})
                states = {**states, self._name: {**states.get(self._name, {}), BEST: score}}
                checkpoints.save(self._best_path, {**saved, "callbacks": states})
            except OSError as error:
                warn(f"{self._best_path} was not written ({error.strerror})")
                return False
        self.best = score
        return self._keeps_best

    def close(self) -> None:
        """Closes the file. Do not call any method afterwards."""
        self._file.close()
