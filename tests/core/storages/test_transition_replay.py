# SPDX-License-Identifier: Apache-2.0
"""The replay of transitions, compared with plain lists of all rows."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from later import later
from true_rows import Envs, Life, fields

from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.storages.replay.transition_replay import (
    UNIFORM,
    Sample,
    TransitionReplay,
    check_goals,
    importance_weights,
)

T, COUNT = 4, 400


def replay_of(k: int = 1, slots: int = 12, **how: Any) -> TransitionReplay:
    return TransitionReplay(fields(T, 1, k), slots * T, k, seed=2, sampling=replace(UNIFORM, **how))


def play(replay: TransitionReplay, envs: Envs, rounds: int, interrupt: float = 0.1) -> None:
    for _ in range(rounds):
        cut = envs.rng.random(2) < interrupt
        rollouts = [envs.next_rollout(0, env, bool(is_cut)) for env, is_cut in enumerate(cut)]
        replay.insert(envs.batch(rollouts), agent=0)


def rows_of(sample: Sample, envs: Envs) -> list[tuple[Life, int]]:
    """The life of each transition and the row of its first outcome."""
    return [envs.by_id[version] for version in sample.policy_version.tolist()]


def assert_same(found: dict[str, np.ndarray], place: int, expected: dict[str, np.ndarray]) -> None:
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name][place], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("k", "n", "alpha", "late"),
    [
        (1, 1, 0.6, False),
        later(1, 1, 0.6, True),
        later(1, 3, 0.0, False),
        (1, 3, 0.0, True),
        later(3, 1, 0.0, False),
        (3, 1, 0.0, True),
        (3, 3, 0.6, False),
        later(3, 3, 0.6, True),
    ],
)
def test_a_transition_is_what_the_lists_of_rows_say(
    k: int, n: int, alpha: float, late: bool
) -> None:
    """Observation, action, rewards, ends and the observation to bootstrap from, by definition."""
    envs, replay = Envs(5, T, k, late=late), replay_of(k, n_step=n, priority_exponent=alpha)
    seen: Counter[str] = Counter()
    for _ in range(12):
        play(replay, envs, rounds=2)
        sample, kept = replay.sample(COUNT), list(stored(replay, envs))
        for b, (life, e) in enumerate(rows_of(sample, envs)):
            assert life.rows[e].is_end or not life.rows[e].values["done"], "a reset is no step"
            last = e
            newest = max(row for other, row in kept if other is life)
            while last < e + n - 1 and not life.rows[last].values["done"] and last < newest:
                last += 1
            values = [life.rows[row].values for row in range(e, last + 1)]
            assert sample.num_joined[b] == len(values)
            rewards = [float(row["reward"]) for row in values] + [0.0] * (n - len(values))
            assert [sample.reward[b], *sample.later_rewards[b]] == rewards
            assert sample.action[b] == life.rows[e].action
            np.testing.assert_array_equal(sample.extras["policy_logits"][b], life.rows[e].logits)
            assert_same(sample.observation, b, life.stack(e - 1, k))
            done, truncated = values[-1]["done"], values[-1]["truncated"]
            assert sample.terminated[b] == (done and not truncated)
            if truncated:
                assert_same(sample.next_observation, b, life.final_stack(last, k))
            elif not done:
                assert_same(sample.next_observation, b, life.stack(last, k))
            seen[f"{'truncated' if truncated else 'done' if done else len(values)}"] += 1
    assert seen["truncated"] > 50 and seen["done"] > 50 and seen[str(n)] > 50
    assert n == 1 or seen["1"] > 10, "a transition ends where nothing newer is stored"


def stored(replay: TransitionReplay, envs: Envs) -> list[tuple[Life, int]]:
    """Every stored row but the first of a trajectory."""
    chunks, length = replay._ring.chunks, replay.unroll_length
    rows = np.arange(chunks.start * length, chunks.stop * length)
    rows = rows[~replay._ring.begin_trajectories(rows)]
    return [envs.by_id[version] for version in replay._rows_of("policy_version", rows).tolist()]


def test_every_transition_that_is_whole_is_sampled_equally_often() -> None:
    envs, replay = Envs(6, T, 1), replay_of()
    play(replay, envs, rounds=20)
    draws = 60_000
    counts = Counter(rows_of(replay.sample(draws), envs))
    rows = stored(replay, envs)
    whole = [row for row in rows if (row[0], row[1] - 1) in rows or row[1] == 1]
    assert set(counts) == set(whole) and len(whole) > 30
    expected = draws / len(whole)
    assert all(abs(count - expected) < 6 * expected**0.5 for count in counts.values())


def test_priorities_decide_how_often_and_the_weights_make_up_for_it() -> None:
    """p_i ** alpha / sum; unseen transitions have the highest priority there was."""
    envs, replay = Envs(7, T, 1), replay_of(priority_exponent=0.5)
    play(replay, envs, rounds=4, interrupt=0.0)
    sample = replay.sample(1000)
    names = np.unique(sample.names)
    priorities = np.where(names % 2 == 0, 4.0, 0.25)
    replay.set_priorities(names, priorities)
    drawn = replay.sample(40_000)
    even = drawn.names % 2 == 0
    share = 2.0 * (names % 2 == 0).sum() / (2.0 * (names % 2 == 0).sum() + 0.5 * (names % 2).sum())
    assert even.mean() == pytest.approx(share, abs=0.01)
    weights = importance_weights(drawn.probabilities, beta=0.5)
    assert weights[even] == pytest.approx(0.5, abs=1e-3)  # (2 / 0.5) ** -0.5
    assert weights[~even] == pytest.approx(1.0, abs=1e-3)
    play(replay, envs, rounds=1, interrupt=0.0)
    new = replay.sample(40_000)
    assert new.probabilities[~np.isin(new.names, names)] == pytest.approx(2.0, abs=1e-3)


def test_rows_that_are_no_transition_are_not_drawn_again_and_again() -> None:
    """The row of a reset, for example, has priority 0 after its first draw."""
    envs, replay = Envs(5, T, 1, late=True), replay_of(priority_exponent=1.0)
    play(replay, envs, rounds=12)
    for _ in range(20):
        replay.sample(COUNT)
    rows = np.arange(replay._ring.rows.start, replay._ring.rows.stop)
    is_whole = replay._is_whole(rows, replay._ring.rows_beside(rows, -1))
    priorities = replay._tree.priorities(replay._ring_rows(rows))
    assert not is_whole.all() and (priorities[~is_whole] == 0).all()
    assert (priorities[is_whole] == 1).all()


def test_overwritten_transitions_keep_no_priority() -> None:
    envs, replay = Envs(8, T, 1), replay_of(slots=6, priority_exponent=1.0)
    play(replay, envs, rounds=2, interrupt=0.0)
    old = replay.sample(50)
    play(replay, envs, rounds=4, interrupt=0.0)
    replay.set_priorities(old.names, np.full(50, 1e6))
    assert replay.sample(500).probabilities.max() == 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_saved_replay_samples_as_the_one_that_was_saved(alpha: float) -> None:
    how = {"n_step": 3, "priority_exponent": alpha}
    envs, replay = Envs(9, T, 3), replay_of(3, **how)
    play(replay, envs, rounds=9)
    if alpha:
        replay.set_priorities(replay.sample(30).names, np.linspace(0.1, 5.0, 30))
    file = io.BytesIO()
    replay.save(file)
    file.seek(0)
    other = replay_of(3, **how)
    other.load(file)
    for _ in range(2):
        for one, two in zip(replay.sample(50), other.sample(50), strict=True):
            np.testing.assert_equal(one, two)
        play(replay, envs, 1)
        file = io.BytesIO()
        replay.save(file)
        file.seek(0)
        other.load(file)


def test_priorities_of_a_smaller_replay_are_those_of_the_newest_steps() -> None:
    envs, replay = Envs(9, T, 1), replay_of(priority_exponent=1.0)
    play(replay, envs, rounds=9, interrupt=0.0)
    names = np.unique(replay.sample(300).names)
    replay.set_priorities(names, 1.0 + names)
    file = io.BytesIO()
    replay.save(file)
    file.seek(0)
    smaller = replay_of(slots=6, priority_exponent=1.0)
    smaller.load(file)
    sample = smaller.sample(300)
    assert sample.probabilities == pytest.approx(1.0 + sample.names)
    assert len(np.unique(sample.names)) > 8


def test_nothing_to_sample_is_a_sentence() -> None:
    with pytest.raises(LookupError, match="no complete transition in 0 of 48 steps"):
        replay_of().sample(1)


# --- hindsight: an environment that counts; the goal is a number

LENGTH = 5


def goal_fields() -> dict[str, Any]:
    made = fields(T, 1, 1)
    leaf = ArraySpec((T + 1, 1, 1), "float32")
    names = ("achieved_goal", "desired_goal", "observation")
    return {**made, "observation": dict.fromkeys(names, leaf)}


def outcome(achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    reached = (achieved == desired).all(axis=1)
    return reached.astype(np.float32), reached


def counting(index: int, is_cut: bool = True, late: bool = False) -> dict[str, Any]:
    """Rollout `index`: episodes of LENGTH steps; what is achieved is the time. is_cut: they are
    truncated, else they terminate. late: each begins in a reset row.
    """
    rows = T * index + np.arange(T + 1)
    episodes, steps = np.divmod(rows, LENGTH + 1 if late else LENGTH)
    times = LENGTH * episodes + steps
    begins = steps == 0
    is_reset = begins & (late | (times == 0))
    steps = np.where(begins & ~is_reset, LENGTH, steps)
    is_end = steps == LENGTH
    done, cuts = is_end | is_reset, is_end & is_cut

    def column(values: Any, dtype: str) -> np.ndarray:
        return np.asarray(values, dtype)[:, None]

    finals = times[1:][cuts[1:]].astype(np.float32)[:, None]
    fresh = times[:, None, None].astype(np.float32)
    observation = {
        "achieved_goal": fresh
        + np.float32(0.5) * begins[:, None, None],  # the next episode's first row
        "desired_goal": np.full_like(fresh, -1.0),
        "observation": fresh,
    }
    zeros = np.zeros(T + 1)
    return {
        "observation": observation,
        "final_observation": {
            "achieved_goal": finals,
            "desired_goal": np.full_like(finals, -1.0),
            "observation": finals,
        },
        "reward": column(zeros, "float32"),
        "done": column(done, "bool"),
        "truncated": column(cuts, "bool"),
        "episode_end": column(cuts, "bool"),
        "episode_step": column(steps, "int32"),
        "episode_return": column(zeros, "float32"),
        "policy_version": column(np.where(is_reset, -1, times), "int64"),
        "action": column(zeros, "int64"),
        "extras": {"policy_logits": np.zeros((T + 1, 1, 3), np.float32)},
        "env_index": column(zeros, "int64"),
        "rollout_index": column(np.full(T + 1, index), "int64"),
    }


def hindsight_replay(share: float, is_cut: bool = True, late: bool = False) -> TransitionReplay:
    sampling = replace(UNIFORM, hindsight=outcome, hindsight_share=share)
    replay = TransitionReplay(goal_fields(), 8 * T, seed=3, sampling=sampling)
    for index in range(11):
        replay.insert(counting(index, is_cut, late), agent=0)
    return replay


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_goals_are_what_was_achieved_later_in_the_same_episode(is_loaded: bool, late: bool) -> None:
    """Each of the times that remain, the last of which only the final observation shows."""
    replay = hindsight_replay(1.0, late=late)
    if is_loaded:
        file = io.BytesIO()
        replay.save(file)
        file.seek(0)
        replay = hindsight_replay(1.0, late=late)
        replay.load(file)
    sample = replay.sample(5000)
    kept = sample.observation["desired_goal"][:, 0] == -1
    complete = 11 * T // (LENGTH + 1) if late else 11 * T // LENGTH  # episodes
    running = sample.policy_version > complete * LENGTH
    assert (sample.policy_version >= 0).all(), "a reset is no step"
    assert (kept == running).all() and 0 < kept.sum() < 1000
    found: dict[int, set[float]] = {}
    chosen = np.flatnonzero(~kept)
    for b in chosen.tolist():
        goal = float(sample.observation["desired_goal"][b, 0])
        assert sample.next_observation["desired_goal"][b, 0] == goal
        found.setdefault(int(sample.policy_version[b]), set()).add(goal)
        reached = goal == sample.policy_version[b]
        assert (sample.reward[b], sample.terminated[b]) == (float(reached), reached)
    assert len(found) > 15
    for time, goals in found.items():
        assert goals == set(range(time, -(-time // LENGTH) * LENGTH + 1)), time


def test_nothing_is_known_of_what_a_terminated_episode_achieved_last() -> None:
    sample = hindsight_replay(1.0, is_cut=False).sample(5000)
    times, goals = sample.policy_version, sample.observation["desired_goal"][:, 0]
    is_last = times % LENGTH == 0
    assert (goals[is_last] == -1).all() and sample.terminated[is_last].all()
    assert {(t % LENGTH, g % LENGTH) for t, g in zip(times, goals, strict=True) if g != -1} == {
        (t, g) for t in range(1, LENGTH) for g in range(t, LENGTH)
    }


def test_the_share_of_changed_goals_is_as_asked_for() -> None:
    sample = hindsight_replay(0.25).sample(20_000)
    is_whole = sample.policy_version <= 11 * T // LENGTH * LENGTH
    changed = sample.observation["desired_goal"][is_whole, 0] != -1
    assert changed.mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("scale", [1, 10])
def test_rewards_unlike_those_of_the_goals_are_reported_once(
    scale: int, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rewards, ended = outcome(achieved, desired)
        return rewards + scale - 1, ended

    sampling = replace(UNIFORM, hindsight=scaled, hindsight_share=0.5)
    replay = TransitionReplay(goal_fields(), 8 * T, seed=3, sampling=sampling)
    for index in range(11):
        replay.insert(counting(index), agent=0)
    for _ in range(3):
        replay.sample(50)
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) == (scale != 1)
    assert all("a different reward than compute_reward returns" in report for report in reports)
    assert all(
        "50 of 50 sampled steps" in report and "0 instead of 9" in report for report in reports
    )


def test_hindsight_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"achieved_goal and desired_goal.*\['image', 'vector'\]"):
        check_goals(fields(T, 1, 1)["observation"], 1)
    with pytest.raises(ValueError, match="single observations, but 3 frames are stacked"):
        check_goals(goal_fields()["observation"], 3)


def test_priorities_that_were_saved_with_another_exponent_are_converted() -> None:
    envs, replay = Envs(9, T, 1), replay_of(priority_exponent=1.0)
    play(replay, envs, rounds=4, interrupt=0.0)
    names = np.unique(replay.sample(300).names)
    replay.set_priorities(names, np.full(len(names), 16.0))
    file = io.BytesIO()
    replay.save(file)
    file.seek(0)
    other = replay_of(priority_exponent=0.5)
    other.load(file)
    sample = other.sample(300)
    seen = np.isin(sample.names, names)
    assert sample.probabilities[seen] == pytest.approx(4.0, rel=1e-4)
    play(other, envs, rounds=1, interrupt=0.0)
    new = other.sample(300)
    assert new.probabilities[~np.isin(new.names, names)].max() == pytest.approx(4.0, rel=1e-4)


def test_a_replay_that_was_sampled_for_months_can_be_restored() -> None:
    envs, replay, other = Envs(9, T, 1), replay_of(), replay_of()
    play(replay, envs, rounds=9)
    replay.sampled = 2**41
    file = io.BytesIO()
    replay.save(file)
    file.seek(0)
    other.load(file)
    assert other.sampled == 2**41
