# SPDX-License-Identifier: Apache-2.0
"""Statistics of runs by their definitions (Agarwal et al. 2021); rliable gave the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from later import later

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


def test_each_task_counts_equally_whatever_its_number_of_runs() -> None:
    many, few = np.array([0.2] * 9), np.array([0.8])
    assert estimates.iqm([many, few]) == pytest.approx(0.5)


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


@pytest.mark.parametrize("runs", [(5, 5), later((10, 10)), later((30, 30)), (5, 50)])
@pytest.mark.parametrize("num_tasks", [1, 2])
def test_intervals_cover_the_true_value_about_as_often_as_they_say(
    runs: tuple[int, int], num_tasks: int
) -> None:
    """For equal sets of runs P(A > B) is 0.5; the true IQM of a normal distribution is its mean."""
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        a, b = ([rng.normal(3, 1, size=n) for _ in range(num_tasks)] for n in runs)
        drawn = [estimates.resampled(each, rng, 500) for each in (a, b)]
        (of_a, of_pairs) = (
            estimates.interval(estimates.iqm(drawn[0]), a),
            estimates.interval(estimates.probability_of_improvement(*drawn), [*a, *b]),
        )
        covered.append((of_a[0] <= 3 <= of_a[1], of_pairs[0] <= 0.5 <= of_pairs[1]))
    assert np.all(np.mean(covered, 0) >= 0.92) and np.all(np.mean(covered, 0) <= 0.99)
