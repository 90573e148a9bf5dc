# SPDX-License-Identifier: Apache-2.0
"""Statistics of few runs on several tasks (Agarwal et al. 2021, arXiv:2108.13264).

A score is one number for a run. `tasks` is a list with an array of scores for each task, [..., N]
with N runs, which may differ between tasks. Leading dimensions are resamples.

Intervals come from the stratified bootstrap: each task's runs are drawn again, with replacement,
and the statistic is computed again. The plain percentiles of these resamples make intervals that
are too narrow for few runs, so wider percentiles are used (Hesterberg 2015, arXiv:1411.5279,
"expanded percentile"). From five runs of a task on, the intervals cover about what they say;
benchmarks/interval_coverage.py measures it. With fewer runs they are still too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
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
    """Returns the interquartile mean of the runs of a task, the mean of the middle half; then the
    mean over tasks, so that each task counts equally.

    A quarter of a task's runs, rounded down, is left out at each end.

    Args:
        tasks: Scores [..., N] of each task, on the same scale.

    Returns:
        An array [...].
    """
    each = []
    for task in tasks:
        cut = task.shape[-1] // 4
        each.append(np.sort(task, -1)[..., cut : task.shape[-1] - cut].mean(-1))
    return np.mean(each, 0)


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


def interval(resamples: np.ndarray, tasks: Tasks) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of the interval of a statistic.

    Args:
        resamples: The statistic of each resample, [resamples, ...].
        tasks: The scores [..., N] that were drawn again; only their numbers N count.
    """
    tail = _tail([task.shape[-1] for task in tasks])
    low, high = np.quantile(resamples, [tail, 1 - tail], axis=0)
    return low, high


def _tail(counts: Sequence[int]) -> float:
    """Returns the share of resamples beyond each end of an interval, by the runs of each task and
    set.

    The bootstrap takes a sample's variance for the population's, and a normal distribution for
    Student's. As for a sum of means, whose samples may differ in size (Welch 1947), the interval is
    widened by both errors.
    """
    runs = np.array(counts, float)
    variances, own_freedom = 1 / runs, np.maximum(1, runs - 1)
    freedom = float(variances.sum() ** 2 / (variances**2 / own_freedom).sum())
    missing = float(variances.sum() / (variances * own_freedom / runs).sum())
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    t = (  # Student's quantile (Abramowitz and Stegun 1964, 26.7.5)
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
    return NormalDist().cdf(-t * math.sqrt(missing))


def estimate(value: np.ndarray, resamples: np.ndarray, tasks: Tasks) -> Estimate:
    """Returns a statistic with its interval.

    Args:
        value: The statistic of the runs themselves.
        resamples: The statistic of each resample.
        tasks: The scores that were drawn again.
    """
    low, high = interval(resamples, tasks)
    return Estimate(float(value), float(low), float(high))
