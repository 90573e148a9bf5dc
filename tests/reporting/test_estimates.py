# SPDX-License-Identifier: Apache-2.0
"""Statistics of runs by their definitions (Agarwal et al. 2021); rliable gave the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from torchbeast.reporting import estimates

RNG = np.random.default_rng(5)
OURS = [RNG.normal(size=n).round(1) for n in (10, 7, 9)]
THEIRS = [(RNG.normal(size=n) + 0.3).round(1) for n in (8, 8, 5)]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 2.0, 9.0], 4.0),  # a quarter of three runs is none
        ([9.0, 1.0, 2.0, 4.0], 3.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0], 3.5),
    ],
)
def test_the_interquartile_mean_is_the_mean_of_the_middle_half(
    scores: list[float], expected: float
) -> None:
    assert estimates.iqm([np.array(scores)]) == expected
    halves = [np.array(scores[:1]), np.array(scores[1:])]
    assert estimates.iqm([half for half in halves if len(half)]) == expected


def test_the_probability_of_improvement_counts_pairs_within_each_task() -> None:
    shares = [
        np.mean([1.0 if x > y else 0.5 if x == y else 0.0 for x, y in itertools.product(a, b)])
        for a, b in zip(OURS, THEIRS, strict=True)
    ]
    found = estimates.probability_of_improvement(OURS, THEIRS)
    assert found == pytest.approx(np.mean(shares))
    assert found + estimates.probability_of_improvement(THEIRS, OURS) == pytest.approx(1)
    assert any(np.isin(a, b).any() for a, b in zip(OURS, THEIRS, strict=True)), "no score is equal"


def test_the_profile_is_the_share_of_runs_above_a_threshold() -> None:
    tasks = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.0, 9.0])]
    found = estimates.profile(tasks, np.array([0.0, 2.0, 5.0, 9.0]))
    np.testing.assert_allclose(found, [1.0, (2 / 4 + 1 / 2) / 2, (0 + 1 / 2) / 2, 0.0])


def test_runs_are_drawn_within_their_task_and_with_replacement() -> None:
    tasks = [np.arange(4.0), np.arange(10.0, 16.0)]
    drawn = estimates.resampled(tasks, np.random.default_rng(0), 1000)
    assert [each.shape for each in drawn] == [(1000, 4), (1000, 6)]
    for task, each in zip(tasks, drawn, strict=True):
        assert set(each.ravel()) == set(task)
        repeats = np.mean([len(set(row)) < len(row) for row in each])
        assert repeats > 0.8
        np.testing.assert_allclose(each.mean(), task.mean(), atol=0.1)


@pytest.mark.parametrize(("runs", "lowest"), [(10, 0.88), (30, 0.9)])
def test_intervals_cover_the_true_value_about_as_often_as_they_say(
    runs: int, lowest: float
) -> None:
    """The true IQM of a normal distribution is its mean, here 3."""
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        tasks = [rng.normal(3, 1, size=runs), rng.normal(3, 1, size=runs)]
        low, high = estimates.interval(estimates.iqm(estimates.resampled(tasks, rng, 500)))
        covered.append(low <= 3 <= high)
    assert lowest <= np.mean(covered) <= 0.98
