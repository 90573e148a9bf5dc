# SPDX-License-Identifier: Apache-2.0
"""The replay of rollouts by priority, compared with the rows that environments gave."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from test_rollout_replay import CASES, KEYS, check_window, one_life, play_some, row_of
from true_rows import Envs, fields

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.storages.replay.rollout_replay import ByPriority, Priorities, RolloutReplay

NOTHING = np.empty(0, np.int64), np.empty(0)


def made(T: int, capacity: int, burn_in: int = 0, alpha: float = 1.0, k: int = 1) -> RolloutReplay:
    return RolloutReplay(fields(T, 1, k), capacity, k, 3, ByPriority(alpha, math.gcd(T, burn_in)))


def insert(replay: RolloutReplay, envs: Envs, rollouts: Any, priorities: Any) -> None:
    for agent in {life.agent for life, _ in rollouts}:
        pairs = zip(rollouts, priorities, strict=True)
        chosen = [(rollout, priority) for rollout, priority in pairs if rollout[0].agent == agent]
        batch, sizes = [rollout for rollout, _ in chosen], np.array([size for _, size in chosen])
        replay.insert(envs.batch(batch), agent, priorities=Priorities(sizes, *NOTHING))


def set_priorities(replay: RolloutReplay, names: list[int], sizes: list[float]) -> None:
    """As an update that inserts nothing."""
    specs = fields(replay.unroll_length, 0, 1)
    arrays = map_leaves(lambda spec: np.empty(spec.shape, spec.dtype), specs)
    arrays["final_observation"] = arrays["observation"]
    update = Priorities(np.empty(0), np.array(names), np.array(sizes))
    replay.insert(arrays, priorities=update)


@pytest.mark.parametrize(("T", "k", "capacity", "ends"), CASES)
def test_windows_are_true_rows_wherever_they_begin(
    T: int, k: int, capacity: int, ends: float
) -> None:
    envs = Envs(10 * T + k, T, k, ends, late=True)
    replay = made(T, capacity, burn_in=T - 1, k=k)  # with T - 1, any row may begin a window
    seen, compared = set(), 0
    for _ in range(50):
        rollouts = play_some(envs)
        insert(replay, envs, rollouts, np.ones(len(rollouts)))
        for _ in range(4):
            try:
                window = replay.draw()
            except LookupError:  # of a small replay, every other window's stack is overwritten
                break
            seen.add(check_window(replay, window, envs))
            compared += 1
    assert capacity < 10 or (compared > 30 and len(seen) >= 8)
    assert len({life.env_index for life, _ in seen}) <= len(KEYS)


@pytest.mark.parametrize(("T", "burn_in", "stride"), [(4, 0, 4), (6, 4, 2), (6, 3, 3), (5, 2, 1)])
def test_each_step_is_trained_on_in_some_window(T: int, burn_in: int, stride: int) -> None:
    """Only those of the first burn-in of an environment, and what is not complete yet, are not."""
    envs, rollouts = one_life(T, [7, 3, 100])
    replay = made(T, 1000, burn_in)
    for count, rollout in enumerate(rollouts[:10], start=1):
        insert(replay, envs, [rollout], [1.0])
        starts = {row_of(replay.draw()) for _ in range(40 * count)}
        assert starts == set(range(0, (count - 1) * T + 1, stride))
        trained = {row + t for row in starts for t in range(burn_in + 1, T + 1)}
        assert trained == set(range(burn_in + 1, count * T + 1))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_windows_are_drawn_in_proportion_to_their_priorities(alpha: float) -> None:
    T, sizes = 3, [1.0, 4.0, 0.25, 9.0, 0.0, 2.0]
    envs, rollouts = one_life(T, [50])
    replay = made(T, 1000, alpha=alpha)
    insert(replay, envs, rollouts[:4], sizes[:4])
    insert(replay, envs, rollouts[4:6], [7.0, 7.0])
    names = {row_of(window): replay.name(window) for window in (replay.draw() for _ in range(500))}
    set_priorities(replay, [names[4 * T], names[5 * T]], sizes[4:])
    draws = 20_000
    windows = [replay.draw() for _ in range(draws)]
    counts = Counter(row_of(window) // T for window in windows)
    powers = (np.array(sizes) + 1e-6) ** alpha
    shares = powers / powers.sum()
    found = np.array([counts[n] for n in range(6)]) / draws
    np.testing.assert_allclose(found, shares, atol=6 * (0.25 / draws) ** 0.5)
    ratios = {row_of(window) // T: replay.ratio(window) for window in windows}
    for n, ratio in ratios.items():
        assert ratio == pytest.approx(shares[n] * 6)


def test_priorities_of_overwritten_windows_are_not_given_to_their_successors() -> None:
    T, slots = 2, 4
    envs, rollouts = one_life(T, [50])
    replay = made(T, slots * T)
    for rollout in rollouts[:2]:
        insert(replay, envs, [rollout], [1.0])
    old = [replay.name(replay.draw()) for _ in range(50)]
    for rollout in rollouts[2:8]:
        insert(replay, envs, [rollout], [1.0])
    set_priorities(replay, old, [1e9] * len(old))
    windows = [replay.draw() for _ in range(200)]
    assert {row_of(window) // T for window in windows} == {5, 6, 7}, "of which all rows are stored"
    assert [replay.ratio(window) for window in windows] == pytest.approx([4 / 3] * 200)


def test_a_saved_replay_draws_as_before() -> None:
    T = 4
    envs, rollouts = one_life(T, [9] * 10)
    before, after = made(T, 12 * T, 2, 0.7), made(T, 12 * T, 2, 0.7)
    for number, rollout in enumerate(rollouts[:15]):
        insert(before, envs, [rollout], [1.0 + number])
    file = io.BytesIO()
    before.save(file)
    file.seek(0)
    after.load(file)
    for replay in (before, after):
        insert(replay, envs, rollouts[15:16], [3.0])
    drawn = [[replay.name(replay.draw()) for _ in range(100)] for replay in (before, after)]
    assert drawn[0] == drawn[1] and len({*drawn[0]}) > 5


def test_an_empty_replay_has_nothing_to_draw() -> None:
    with pytest.raises(LookupError, match="no complete rollout"):
        made(4, 100).draw()
