# SPDX-License-Identifier: Apache-2.0
"""Stacks rebuilt from single frames, against stacks kept one environment at a time."""

from __future__ import annotations

import numpy as np
import pytest

from torchbeast.core.envs.frame_stack import FrameStacker, frame_spec, stacked_space
from torchbeast.core.envs.spaces import ArraySpec


def frames(*values: int, channels: int = 1) -> np.ndarray:
    """Returns frames uint8 [E, C, 2]; frame e is filled with values[e]."""
    return np.array([[[value] * 2] * channels for value in values], np.uint8)


def contents(stack: np.ndarray) -> list[list[int]]:
    """Returns for each environment the values of its frames, oldest first."""
    return stack[:, :, 0].tolist()


def test_the_first_frame_fills_its_stack() -> None:
    assert contents(FrameStacker(3).reset(frames(1, 2))) == [[1, 1, 1], [2, 2, 2]]


def test_new_frames_come_last() -> None:
    stacker = FrameStacker(3)
    stacker.reset(frames(1))
    alive = np.array([False])
    assert contents(stacker.push(frames(2), alive)) == [[1, 1, 2]]
    assert contents(stacker.push(frames(3), alive)) == [[1, 2, 3]]
    assert contents(stacker.push(frames(4), alive)) == [[2, 3, 4]]


def test_an_episodes_first_frame_fills_only_its_own_stack() -> None:
    stacker = FrameStacker(2)
    stacker.reset(frames(1, 2))
    assert contents(stacker.push(frames(3, 4), np.array([True, False]))) == [[3, 3], [2, 4]]


def test_a_reset_forgets_what_was_before() -> None:
    stacker = FrameStacker(2)
    stacker.reset(frames(1))
    assert contents(stacker.reset(frames(5))) == [[5, 5]]


def test_final_stacks_hold_the_frames_of_the_episode_that_was_cut() -> None:
    stacker = FrameStacker(3)
    stacker.reset(frames(1, 2, 3))
    stacker.push(frames(4, 5, 6), np.zeros(3, bool))
    truncated = np.array([True, False, True])
    assert contents(stacker.final(frames(7, 9), truncated)) == [[1, 4, 7], [3, 6, 9]]
    assert contents(stacker.push(frames(10, 11, 12), truncated))[1] == [2, 5, 11]


def test_frames_of_several_channels_stay_together() -> None:
    stacker = FrameStacker(2)
    stacker.reset(frames(1, channels=3))
    pushed = stacker.push(frames(2, channels=3), np.array([False]))
    assert contents(pushed) == [[1, 1, 1, 2, 2, 2]]


def test_every_leaf_of_a_nest_is_stacked() -> None:
    stacker = FrameStacker(2)
    stacker.reset({"a": frames(1), "b": (frames(2, channels=2),)})
    stack = stacker.push({"a": frames(3), "b": (frames(4, channels=2),)}, np.array([False]))
    assert contents(stack["a"]) == [[1, 3]]
    assert contents(stack["b"][0]) == [[2, 2, 4, 4]]


def test_a_stack_of_one_is_the_observation_itself() -> None:
    stacker = FrameStacker(1)
    first, second = frames(1), frames(2)
    assert stacker.reset(first) is first
    assert stacker.push(second, np.array([False])) is second
    np.testing.assert_array_equal(stacker.push(second, np.array([True])), second)
    np.testing.assert_array_equal(stacker.final(frames(9), np.array([True])), frames(9))


def test_returned_stacks_are_not_written_to_later() -> None:
    stacker = FrameStacker(2)
    returned = [stacker.reset(frames(1))]
    kept = [returned[0].copy()]
    for value in range(2, 6):
        returned.append(stacker.push(frames(value), np.array([value == 4])))
        kept.append(returned[-1].copy())
    for a, b in zip(returned, kept, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_frames", [1, 2, 4])
def test_stacks_equal_those_kept_frame_by_frame(num_frames: int) -> None:
    """Episodes end at random; the oracle is a Python list of frames for each environment."""
    rng = np.random.default_rng(0)
    stacker = FrameStacker(num_frames)
    first = frames(*rng.integers(256, size=3))
    stacker.reset(first)
    histories = [[int(value)] * num_frames for value in first[:, 0, 0]]
    restarts = 0
    for _ in range(100):
        new, done = frames(*rng.integers(256, size=3)), rng.random(3) < 0.2
        for e, value in enumerate(new[:, 0, 0].tolist()):
            histories[e] = [value] * num_frames if done[e] else [*histories[e][1:], value]
        assert contents(stacker.push(new, done)) == histories
        restarts += int(done.sum())
    assert restarts


def test_the_policys_space_has_the_stack_in_its_first_dimension() -> None:
    space = {"a": ArraySpec((1, 84, 84), "uint8"), "b": (ArraySpec((3,), "float32"),)}
    expected = {"a": ArraySpec((4, 84, 84), "uint8"), "b": (ArraySpec((12,), "float32"),)}
    assert stacked_space(space, 4) == expected
    assert stacked_space(space, 1) == space


def test_a_stack_has_the_bounds_of_its_frames_and_the_categories_of_each() -> None:
    bounds = ArraySpec((1, 2), "uint8", 0, 9)
    assert stacked_space(bounds, 3) == ArraySpec((3, 2), "uint8", 0, 9)
    same = ArraySpec((2,), "int64", categories=(5, 5), start=(1, 1))
    assert stacked_space(same, 2) == ArraySpec((4,), "int64", categories=(5,), start=(1,))
    each = ArraySpec((2,), "int64", categories=(5, 3), start=(1, 0))
    expected = ArraySpec((4,), "int64", categories=(5, 3, 5, 3), start=(1, 0, 1, 0))
    assert stacked_space(each, 2) == expected


def test_a_number_cannot_be_stacked() -> None:
    assert stacked_space(ArraySpec((), "int64"), 1) == ArraySpec((), "int64")
    with pytest.raises(ValueError, match="cannot be stacked 4 times"):
        stacked_space(ArraySpec((), "int64"), 4)


def test_a_stack_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        FrameStacker(0)


def test_a_frame_is_found_in_a_stack_whose_entries_have_categories_of_their_own() -> None:
    each = ArraySpec((2,), "int64", categories=(5, 3), start=(1, 0))
    assert frame_spec(stacked_space(each, 2), 2) == ArraySpec((2,), "int64")
