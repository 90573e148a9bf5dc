# SPDX-License-Identifier: Apache-2.0
"""Statistics of few runs on several tasks (Agarwal et al. 2021, arXiv:2108.13264).

A score is one number for a run. `tasks` is a list with an array of scores for each task, [..., N]
with N runs, which may differ between tasks. Leading dimensions are resamples.

Intervals come from the stratified percentile bootstrap: each task's runs are drawn again, with
replacement, and the statistic is computed again. With fewer than about five runs per task such
intervals are too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Tasks = Sequence[np.ndarray]

RESAMPLES = 5_000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A statistic, and the ends of its interval; all three are equal for a single run per task."""

    value: float
    low: float
    high: float


def iqm(tasks: Tasks) -> np.ndarray:
    """Returns the interquartile mean of the runs of all tasks: the mean of the middle half.

    A quarter of the runs, rounded down, is left out at each end.

    Args:
        tasks: Scores [..., N] of each task, on the same scale.

    Returns:
        An array [...].
    """
    scores = np.sort(np.concatenate(list(tasks), -1), -1)
    cut = scores.shape[-1] // 4
    return np.asarray(scores[..., cut : scores.shape[-1] - cut].mean(-1))


def probability_of_improvement(ours: Tasks, theirs: Tasks) -> np.ndarray:
    """Returns the probability that one of our runs scores higher than one of theirs on a random
    task; equal scores count half.

    Args:
        ours: Scores [..., N] of each task.
        theirs: Scores [..., M] of the same tasks.

    Returns:
        An array [...].
    """
    each = []
    for a, b in zip(ours, theirs, strict=True):
        signs = np.sign(a[..., :, None] - b[..., None, :])
        each.append(0.5 + 0.5 * signs.mean((-2, -1)))
    return np.mean(each, 0)


def profile(tasks: Tasks, thresholds: np.ndarray) -> np.ndarray:
    """Returns the performance profile: the share of runs above each threshold, mean over tasks.

    Args:
        tasks: Scores [..., N] of each task, on the same scale.
        thresholds: [K], on that scale.

    Returns:
        An array [..., K].
    """
    return np.mean([(task[..., None] > thresholds).mean(-2) for task in tasks], 0)


def resampled(
    tasks: Tasks, rng: np.random.Generator, resamples: int = RESAMPLES
) -> list[np.ndarray]:
    """Returns the tasks with runs that are drawn with replacement, [resamples, N] each.

    Args:
        tasks: Scores [N] of each task.
        rng: Draws them.
        resamples: How often to draw.
    """
    return [task[rng.integers(len(task), size=(resamples, len(task)))] for task in tasks]


def interval(resamples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of the percentile interval of a statistic.

    Args:
        resamples: The statistic of each resample, [resamples, ...].
    """
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resamples, [tail, 100 - tail], axis=0)
    return low, high


def estimate(value: np.ndarray, resamples: np.ndarray) -> Estimate:
    """Returns a statistic with its interval.

    Args:
        value: The statistic of the runs themselves.
        resamples: The statistic of each resample.
    """
    low, high = interval(resamples)
    return Estimate(float(value), float(low), float(high))
