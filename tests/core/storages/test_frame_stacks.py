# SPDX-License-Identifier: Apache-2.0
"""Stacks that are rebuilt from the frames of a rollout are those that the policy saw."""

from __future__ import annotations

import numpy as np
import pytest

from torchbeast.core.envs.frame_stack import rebuild_rows, store_row

T, B = 7, 3
SHAPE = 2, 3  # of a frame


def seen_stacks(begins: np.ndarray, k: int) -> np.ndarray:
    """Returns the stacks [T+1, B, k * 2, 3] after k earlier rows, by their definition.

    begins: bool [k+T+1, B], where an episode does; True in row 0. Every frame is unlike all others.
    """
    frames = np.arange(begins.size * 6, dtype=np.uint16).reshape(*begins.shape, *SHAPE)
    stacks = np.empty((T + 1, B, k * SHAPE[0], SHAPE[1]), np.uint16)
    for t, b in np.ndindex(T + 1, B):
        row = k + t
        first = max(start for start in range(row + 1) if begins[start, b])
        stacks[t, b] = np.concatenate([frames[max(first, row - age), b] for age in range(k)][::-1])
    return stacks


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0], ids=["no ends", "some ends", "all ends"])
def test_stacks_are_rebuilt_where_episodes_end_in_any_rows(k: int, chance: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        begins = random.random((k + T + 1, B)) < chance
        begins[0] = True
        stacks = seen_stacks(begins, k)
        frames = np.zeros((T + k, B, *SHAPE), np.uint16)
        for t in range(T + 1):
            store_row(frames, t, stacks[t], k)
        batch = np.zeros((T + 1, B + 2, k * SHAPE[0], SHAPE[1]), np.uint16)
        rebuild_rows(batch[:, 1:-1], frames, begins[k:])
        np.testing.assert_array_equal(batch[:, 1:-1], stacks)
        assert not batch[:, 0].any() and not batch[:, -1].any()
