# SPDX-License-Identifier: Apache-2.0
"""Evaluates during training, and keeps the best checkpoint."""

from __future__ import annotations

import logging
import math
import statistics
from typing import TYPE_CHECKING, Any

from torchbeast.core.checks import at_least
from torchbeast.evaluation import scores
from torchbeast.learner.callback import Callback, Schedule
from torchbeast.seeds import seed_of

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner

_log = logging.getLogger("torchbeast.learner")


class Evaluation(Callback):
    """Plays whole episodes every so often and after the last step, and keeps the best checkpoint.

    It adds the columns NAME_mean_return and NAME_mean_length. The checkpoint with the highest mean
    return so far is NAME_best.tar in log_dir, also if the run is resumed or begun anew there.
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
        name: str = scores.NAME,
    ) -> None:
        """Takes either every_steps, in env steps, or every_seconds.

        num_episodes, sampled: as in `Learner.evaluate`. seed: of the environments; with the same
        one, evaluations after equally many steps of different runs play the same starts.
        """
        at_least(1, num_episodes=num_episodes)
        self.best = -math.inf  # mean return of the best checkpoint
        self._schedule = Schedule(every_steps, every_seconds)
        self._num_episodes, self._sampled = num_episodes, sampled
        self._keeps_best, self._seed, self._name = keep_best, seed, name

    @property
    def name(self) -> str:
        """Begin of its columns, and of the name of its file."""
        return self._name

    def on_start(self, learner: Learner) -> None:
        """Begins to wait; a checkpoint that is kept may be better than any of this run."""
        self._schedule.mark(learner.steps)
        if self._keeps_best:
            self.best = max(self.best, scores.kept_score(learner.log_dir, self._name))

    def on_step(self, learner: Learner, figures: dict[str, float]) -> None:
        """Evaluates if it is time."""
        if self._schedule.is_due(learner.steps) or learner.done():
            figures.update(self._evaluate(learner))
            self._schedule.mark(learner.steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best mean return."""
        return {scores.BEST: self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.best = state.get(scores.BEST, -math.inf)

    def _evaluate(self, learner: Learner) -> dict[str, float]:
        seed = seed_of(self._seed, self._name, learner.steps)
        played = learner.evaluate(self._num_episodes, sampled=self._sampled, seed=seed)
        score = statistics.fmean(played.returns)
        if score > self.best:
            self._keep(learner, score)
        return {
            f"{self._name}_mean_return": score,
            f"{self._name}_mean_length": statistics.fmean(played.lengths),
        }

    def _keep(self, learner: Learner, score: float) -> None:
        before, self.best = self.best, score  # the checkpoint says how good it is
        try:
            if self._keeps_best:
                learner.save_model(scores.best_path(learner.log_dir, self._name))
        except OSError as error:
            self.best = before
            _log.warning("the best checkpoint was not written (%s); the run goes on", error)
