# SPDX-License-Identifier: Apache-2.0
"""The sum tree, compared with plain sums."""

from __future__ import annotations

import numpy as np
import pytest

from torchbeast.core.storages.replay.store import SumTree


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100])
def test_it_finds_what_a_running_sum_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, listed = SumTree(size), np.zeros(size)
    for _ in range(30):
        entries = rng.integers(size, size=5)
        values = rng.integers(4, size=5).astype(float)
        tree.set(entries, values)
        for entry, value in zip(entries, values, strict=True):
            listed[entry] = value
        assert tree.total == listed.sum()
        np.testing.assert_array_equal(tree.priorities(np.arange(size)), listed)
        if tree.total:
            targets = np.append(rng.random(50) * tree.total, np.arange(int(tree.total)))
            expected = np.searchsorted(np.cumsum(listed), targets, side="right")
            np.testing.assert_array_equal(tree.find(targets), expected)


def test_entries_without_a_priority_are_never_found_even_at_the_total() -> None:
    tree = SumTree(8)
    tree.set(np.arange(3), 0.1)
    assert tree.find(np.array([0.0, tree.total, 2 * tree.total])).tolist() == [0, 2, 2]


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_what_is_no_priority_is_refused(wrong: float) -> None:
    tree = SumTree(4)
    with pytest.raises(ValueError, match="finite and at least 0"):
        tree.set(np.array([1]), np.array([wrong]))
    assert tree.total == 0
