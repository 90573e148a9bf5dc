# SPDX-License-Identifier: Apache-2.0
"""The score of an agent of many tasks: the mean of its normalised mean returns in each.

(return - low) / (high - low)      low and high are given, by task_returns
the same, but at most 1            Atari games: random play and a human, and the score is the
                                   mean capped human-normalised score of Espeholt et al. 2018
return                             unless all tasks are Atari games
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping

from torchbeast.envs.spec import EnvSpec, game_of
from torchbeast.zoo import ATARI_SCORES


class TaskScores:
    """The score of an agent, and the names of its tasks.

    Attributes:
        names: Of the tasks, by their numbers.
    """

    def __init__(self, env: EnvSpec) -> None:
        """Takes the tasks and the task_returns of an environment."""
        self.names = env.task_names
        pairs = iter(env.options.task_returns)
        self._ranges = list(zip(pairs, pairs, strict=False))
        self._limit = float("inf")
        if not self._ranges:
            with ATARI_SCORES.open(encoding="utf-8") as file:
                of_games = {
                    row["game"].replace("_", ""): (float(row["random"]), float(row["human"]))
                    for row in csv.DictReader(file)
                }
            games = [game_of(name).lower() for name in self.names]
            if all(game in of_games for game in games):
                self._ranges, self._limit = [of_games[game] for game in games], 1.0

    def __call__(self, returns: Mapping[int, float]) -> float:
        """Returns the score.

        Args:
            returns: Mean returns by the numbers of tasks, at least one.
        """
        return statistics.fmean(self._score(task, mean) for task, mean in returns.items())

    def _score(self, task: int, mean: float) -> float:
        if not self._ranges:
            return mean
        low, high = self._ranges[task]
        return min(self._limit, (mean - low) / (high - low))
