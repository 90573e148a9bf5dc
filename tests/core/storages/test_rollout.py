# SPDX-License-Identifier: Apache-2.0
"""The learner's batch and its checks."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assorted import check_rollout

from torchbeast.core.base.nest import flatten
from torchbeast.core.storages.rollout import Rollout

T, B = 5, 3
Make = Callable[..., Rollout]


def test_steps_are_counted_without_the_overlapping_row(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    assert (rollout.unroll_length, rollout.batch_size, rollout.num_steps) == (T, B, T * B)


def test_the_lag_counts_versions_between_acting_and_learning(make_rollout: Make) -> None:
    versions = torch.full((T + 1, B), 3)
    versions[0] = -100  # row 0's action was learnt from in the rollout before
    versions[1, 0] = 1
    lags = make_rollout(T, B, policy_version=versions).lags(3)
    assert lags["max_lag"] == 2
    assert lags["mean_lag"] == pytest.approx(2 / (T * B))
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[1, 0] = False
    assert make_rollout(T, B, policy_version=versions, valid=valid).lags(3)["max_lag"] == 0
    assert make_rollout(T, B, valid=torch.zeros_like(valid)).lags(3) == {}


def test_a_column_has_the_bytes_of_all_rows_and_leaves(make_rollout: Make) -> None:
    seen = {"a": torch.zeros(T + 1, B, 5), "b": torch.zeros(T + 1, B, 2, 2, dtype=torch.uint8)}
    assert make_rollout(T, B, observation=seen).column_bytes == (T + 1) * (4 * 5 + 2 * 2)


def test_a_rollout_can_be_pickled(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    assert torch.equal(pickle.loads(pickle.dumps(rollout)).reward, rollout.reward)


@pytest.mark.parametrize("state", [(), (torch.zeros(2, B, 4), torch.zeros(2, B, 4))])
def test_a_sound_rollout_passes_its_check(make_rollout: Make, state: Any) -> None:
    check_rollout(
        make_rollout(T, B, truncated=[(0, 0), (2, 1), (5, 0)], terminated=[(3, 2)], state=state)
    )


def test_a_rollout_without_truncations_needs_no_final_observation(make_rollout: Make) -> None:
    check_rollout(make_rollout(T, B, final_observation=()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", torch.zeros(1, B)),
        ("done", torch.zeros(T, B)),
        ("episode_step", torch.zeros(T + 1, B, 1)),
        ("valid", torch.zeros(T, B)),
        ("replayed", torch.eye(T + 1, B, dtype=torch.bool)),
        ("observation", {"a": torch.zeros(T + 1, B, 2), "b": torch.zeros(B, T + 1, 2)}),
        ("action", torch.zeros(T, B)),
        ("extras", {"value": torch.zeros(T, B)}),
        ("initial_agent_state", (torch.zeros(1, B + 1, 4),)),
        ("final_observation", torch.zeros(2, 4)),
        ("final_observation", torch.zeros(1, 5)),
        ("final_observation", ()),
    ],
)
def test_the_check_of_a_rollout_finds_a_wrong_shape(
    make_rollout: Make, field: str, value: Any
) -> None:
    rollout = make_rollout(T, B, truncated=[(2, 1)])
    with pytest.raises(AssertionError):
        check_rollout(dataclasses.replace(rollout, **{field: value}))


def test_truncations_are_ordered_by_column_then_row_and_row_0_is_not_ours(
    make_rollout: Make,
) -> None:
    rollout = make_rollout(T, B, truncated=[(0, 0), (4, 0), (1, 2), (2, 0), (5, 1)])
    rows, columns = rollout.truncations()
    assert list(zip(columns.tolist(), rows.tolist(), strict=True)) == [
        (0, 2),
        (0, 4),
        (1, 5),
        (2, 1),
    ]


def test_a_split_shares_the_columns_out_evenly_and_in_order(make_rollout: Make) -> None:
    rollout = make_rollout(T, 7, state=(torch.randn(2, 7, 4),))
    parts = rollout.split(3)
    assert [part.batch_size for part in parts] == [2, 2, 3]
    for name in ("observation", "action", "policy_version", "reward"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined, getattr(rollout, name)), name
    states = [part.initial_agent_state[0] for part in parts]
    assert all(state.is_contiguous() for state in states)
    assert torch.equal(torch.cat(states, 1), rollout.initial_agent_state[0])


def test_each_part_of_a_split_has_the_final_observations_of_its_own_truncations(
    make_rollout: Make,
) -> None:
    places = [(0, 0), (4, 0), (1, 2), (2, 0), (5, 1), (3, 3), (5, 3)]
    rollout = make_rollout(T, 5, truncated=places)
    seen = []
    for part in rollout.split(2):
        check_rollout(part)
        seen.append(part.final_observation)
    assert [len(final) for final in seen] == [2, 2, 2]
    assert torch.equal(torch.cat(seen), rollout.final_observation)


CUTS = [(0, 0), (4, 0), (1, 2), (2, 0), (5, 1), (3, 3), (5, 3)]  # (row, column), none in column 4


def test_taken_columns_come_in_the_order_asked_for_with_their_final_observations(
    make_rollout: Make,
) -> None:
    rollout = make_rollout(T, 5, truncated=CUTS, state=(torch.randn(2, 5, 4),))
    which = [3, 0, 4, 2]
    taken = rollout.take(torch.tensor(which))
    check_rollout(taken)
    parts = rollout.split(1)
    for name in ("observation", "action", "reward", "truncated", "env_index"):
        expected = torch.cat([getattr(parts[column], name) for column in which], 1)
        assert torch.equal(getattr(taken, name), expected), name
    finals = torch.cat([parts[column].final_observation for column in which])
    assert len(finals) == 5 and torch.equal(taken.final_observation, finals)
    states = rollout.initial_agent_state[0][:, which]
    assert torch.equal(taken.initial_agent_state[0], states)
    assert (taken.num_steps, taken.env_steps) == (T * 4, 0)


def test_a_taken_step_has_its_own_two_rows_and_final_observation(make_rollout: Make) -> None:
    valid = torch.ones(T + 1, 5, dtype=torch.bool)
    valid[3, 1] = False
    rollout = make_rollout(T, 5, truncated=CUTS, valid=valid)
    rows, columns = rollout.truncations()
    finals = {
        place: rollout.final_observation[number]
        for number, place in enumerate(zip(rows.tolist(), columns.tolist(), strict=True))
    }
    which = torch.randperm(T * 5)
    taken = rollout.take_steps(which)
    check_rollout(taken)
    assert (taken.unroll_length, taken.num_steps, taken.env_steps) == (1, T * 5 - 1, 0)
    seen = []
    for i, number in enumerate(which.tolist()):
        row, column = number // 5, number % 5
        for name in ("observation", "action", "reward", "done", "valid", "policy_version"):
            found, all_rows = getattr(taken, name), getattr(rollout, name)
            assert torch.equal(found[:, i], all_rows[row : row + 2, column]), name
        assert torch.equal(
            taken.extras["policy_logits"][1, i], rollout.extras["policy_logits"][row + 1, column]
        )
        if (row + 1, column) in finals:
            seen.append(finals[row + 1, column])
    assert len(seen) == len(finals) == 6
    assert torch.equal(taken.final_observation, torch.stack(seen))


def test_taken_rows_are_copies(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    before = rollout.reward.clone()
    rollout.take(torch.arange(B)).reward.fill_(9.0)
    rollout.take_steps(torch.arange(T * B)).reward.fill_(9.0)
    assert torch.equal(rollout.reward, before)


def test_what_is_not_wider_than_a_part_is_not_split(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    assert rollout.split(B) == [rollout]


def test_finished_episodes_are_whole_games_of_rows_1_to_T(make_rollout: Make) -> None:
    ends = torch.zeros(T + 1, B, dtype=torch.bool)
    ends[0, 0] = ends[3, 1] = ends[5, 2] = True
    rollout = make_rollout(T, B, terminated=[(0, 0), (2, 0), (3, 1), (5, 2)], episode_end=ends)
    returns, lengths = rollout.finished_episodes()
    assert returns == [rollout.episode_return[3, 1].item(), rollout.episode_return[5, 2].item()]
    assert lengths == [rollout.episode_step[3, 1].item(), rollout.episode_step[5, 2].item()]


def test_only_valid_steps_are_counted(make_rollout: Make) -> None:
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[0, 1] = valid[2, 0] = valid[5, 0] = valid[4, 2] = False
    rollout = make_rollout(T, B, terminated=[(2, 0), (3, 1), (4, 2)], valid=valid)
    check_rollout(rollout)
    assert rollout.num_steps == T * B - 3, "row 0 is no step of this rollout"
    assert rollout.finished_episodes()[0] == [rollout.episode_return[3, 1].item()]
    assert [part.num_steps for part in rollout.split(1)] == [T - 2, T, T - 1]
    assert make_rollout(T, B).valid is None


def test_collected_steps_are_counted_apart_from_those_learnt_from(make_rollout: Make) -> None:
    valid = torch.zeros(T + 1, B, dtype=torch.bool)
    valid[1:3] = True
    relevant = make_rollout(T, B, valid=valid)
    assert (relevant.num_steps, relevant.env_steps) == (2 * B, T * B), "all were collected"
    replayed = make_rollout(T, B, collected=T)  # in one column of the three
    assert (replayed.num_steps, replayed.env_steps) == (T * B, T)
    assert replayed.map(torch.Tensor.clone).env_steps == T
    marked = make_rollout(T, B, replayed=columns(1, 2))
    assert (marked.num_steps, marked.env_steps) == (T * B, T)
    counted = make_rollout(T, B, replayed=columns(1, 2), collected=T)
    for rollout in (relevant, replayed, marked, counted):
        assert sum(part.env_steps for part in rollout.split(1)) == rollout.env_steps


def columns(*marked: int) -> torch.Tensor:
    """[T+1, B], true in these columns."""
    return torch.tensor([column in marked for column in range(B)]).expand(T + 1, B)


def test_replayed_columns_finish_no_episode_and_have_ages_instead_of_lags(
    make_rollout: Make,
) -> None:
    versions = torch.tensor([3, 6, 9]).expand(T + 1, B).clone()
    versions[0] = -100  # row 0's action was learnt from in the rollout before
    ends = [(2, 0), (3, 1), (4, 2)]
    numbers = torch.arange((T + 1.0) * B).reshape(T + 1, B)
    mixed = make_rollout(
        T,
        B,
        terminated=ends,
        policy_version=versions,
        replayed=columns(0, 1),
        info={"number": numbers},
    )
    check_rollout(mixed)
    assert mixed.lags(10) == {"mean_lag": 1.0, "max_lag": 1.0, "replay_age": 5.5}
    assert mixed.finished_episodes()[0] == [mixed.episode_return[4, 2].item()]
    assert mixed.finished_info() == {"number": [numbers[4, 2].item()]}
    assert [part.finished_info()["number"] for part in mixed.split(1)] == [[], [], [14.0]]
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[:, 1] = valid[4, 2] = False
    partly = dataclasses.replace(mixed, valid=valid)
    assert partly.lags(10)["replay_age"] == 7.0
    assert partly.finished_episodes() == ([], []) and partly.finished_info() == {"number": []}
    fresh = dataclasses.replace(mixed, replayed=columns())
    assert fresh.lags(10) == dataclasses.replace(mixed, replayed=None).lags(10)
    assert set(fresh.lags(10)) == {"mean_lag", "max_lag"}
    assert set(dataclasses.replace(mixed, replayed=columns(0, 1, 2)).lags(10)) == {"replay_age"}


def test_only_valid_online_rows_are_new_observations(make_rollout: Make) -> None:
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[2, 1] = False
    rollout = make_rollout(T, B, replayed=columns(0, 2), valid=valid)
    new = rollout.new_observations()
    assert new.shape == (1, T - 1, 4)
    assert torch.equal(new[0], rollout.observation[[1, 3, 4, 5], 1])
    assert make_rollout(T, B, replayed=columns(0, 1, 2)).new_observations().shape == (1, 0, 4)


def test_map_reaches_every_leaf(make_rollout: Make) -> None:
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    state = (torch.zeros(1, B, 4),)
    rollout = make_rollout(
        T,
        B,
        truncated=[(2, 1)],
        state=state,
        valid=valid,
        replayed=valid,
        weights=torch.ones(T + 1, B),
        info={"number": torch.zeros(T + 1, B)},
    )
    moved = rollout.map(lambda leaf: leaf.to("meta"))
    for field in dataclasses.fields(moved):
        if field.name in ("collected", "feeds_back", "give_feedback"):
            continue
        leaves = flatten(getattr(moved, field.name))
        assert leaves and all(leaf.device.type == "meta" for leaf in leaves), field.name
