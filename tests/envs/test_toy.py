# SPDX-License-Identifier: Apache-2.0
"""The toy tasks: their rules, the best returns, and the best return without memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.toy import BitFlip, Catch, Dials, Memory, Mock

Policy = Callable[[np.ndarray], np.ndarray]


def mean_return(env: VecEnv, policy: Policy, num_steps: int) -> float:
    """Returns the mean return of all episodes that end within num_steps."""
    observation, rewards, episodes = env.reset(0), 0.0, 0
    for _ in range(num_steps):
        step = env.step(policy(observation))
        observation = step.observation
        rewards += float(step.reward.sum())
        episodes += int(step.episode_end.sum())
    assert episodes
    return rewards / episodes


def follow_the_ball(board: np.ndarray) -> np.ndarray:
    ball, paddle = board[:, :-1].max(1).argmax(1), board[:, -1].argmax(1)
    return 1 + np.sign(ball - paddle)


def flee_the_ball(board: np.ndarray) -> np.ndarray:
    ball = board[:, :-1].max(1).argmax(1)
    return np.where(ball < 2, 2, 0)


def test_following_the_ball_catches_all_and_fleeing_none() -> None:
    assert mean_return(Catch(50), follow_the_ball, 90) == 1.0
    assert mean_return(Catch(50), flee_the_ball, 90) == -1.0


def test_a_game_of_catch_lasts_nine_steps_and_pays_in_the_last() -> None:
    env = Catch(2)
    env.reset(0)
    steps = [env.step(np.ones(2, np.int64)) for _ in range(18)]
    assert [bool(step.terminated.all()) for step in steps] == ([False] * 8 + [True]) * 2
    assert all((step.reward != 0).tolist() == step.terminated.tolist() for step in steps)


def test_ball_and_paddle_move_as_told() -> None:
    env = Catch(1)
    board = env.reset(0)[0]
    assert board[0].sum() == 1 and board[-1].tolist() == [0, 0, 1, 0, 0]
    for action, column in ((0, 1), (0, 0), (0, 0), (1, 0), (2, 1)):
        board = env.step(np.array([action])).observation[0]
        assert board[-1].argmax() == column
    assert board[5].sum() == 1 and board.sum() == 2


def test_catch_drops_balls_everywhere() -> None:
    board = Catch(200).reset(0)
    counts = board[:, 0].sum(0)
    assert counts.min() > 20


def test_memory_is_solved_by_remembering_the_cue() -> None:
    cues = np.zeros(50)

    def remember(observation: np.ndarray) -> np.ndarray:
        cues[:] = np.where(observation[:, 1] != 0, observation[:, 1], cues)
        return (cues > 0).astype(np.int64)

    assert mean_return(Memory(50), remember, 80) == 1.0


@pytest.mark.parametrize("answer", [0, 1])
def test_memory_cannot_be_solved_without_the_cue(answer: int) -> None:
    constant = mean_return(Memory(500), lambda obs: np.full(500, answer), 16)
    assert abs(constant) < 0.2


def test_the_cue_is_seen_once_and_the_question_last() -> None:
    env = Memory(3, episode_length=4)
    rows = [env.reset(0)]
    rows += [env.step(np.zeros(3, np.int64)).observation for _ in range(4)]
    left, cue, question = np.stack(rows).transpose(2, 0, 1)
    assert left[:, 0].tolist() == [1.0, 0.75, 0.5, 0.25, 1.0]
    assert (cue != 0).all(1).tolist() == [True, False, False, False, True]
    assert question[:, 0].tolist() == [0, 0, 0, 1, 0]


def set_dials(shown: np.ndarray) -> np.ndarray:
    return np.stack([part.argmax(1) for part in np.split(shown, [3, 7], axis=1)], axis=1)


def test_dials_are_solved_by_setting_each_as_shown() -> None:
    assert mean_return(Dials(50), set_dials, 20) == pytest.approx(1.0)


@pytest.mark.parametrize(("dial", "chance"), [(0, 1 / 3), (1, 1 / 4), (2, 1 / 5)])
def test_dials_are_solved_only_by_chance_if_one_is_not_set(dial: int, chance: float) -> None:
    def all_but_one(shown: np.ndarray) -> np.ndarray:
        action = set_dials(shown)
        action[:, dial] = 0
        return action

    assert mean_return(Dials(500), all_but_one, 20) == pytest.approx(chance, abs=0.03)


def test_dials_refuse_a_position_that_does_not_exist() -> None:
    env = Dials(2)
    env.reset(0)
    with pytest.raises(
        ValueError, match=r"between 0 and \[2 3 4\], got \[\[0, 0, 0\], \[0, 4, 4\]\]"
    ):
        env.step(np.array([[0, 0, 0], [0, 4, 4]]))
    with pytest.raises(ValueError, match=r"of shape \(2, 3\), got int64 of \(2,\)"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="expected integer actions"):
        env.step(np.zeros((2, 3)))


def test_mock_content_is_known_beforehand() -> None:
    env = Mock(2, episode_length=3)
    first = env.reset(5)
    values = [first] + [env.step(np.zeros(2, np.int64)).observation for _ in range(4)]
    expected = first[0, 0, 0, 0] + np.array([0, 1, 2, 0, 1], np.uint8)
    for observation, value in zip(values, expected, strict=True):
        assert (observation[0] == value).all()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.array([0, 3]), r"between 0 and 2, got \[0, 3\]"),
        (np.array([-1, 0]), r"between 0 and 2, got \[-1, 0\]"),
        (np.array([0.0, 1.0]), r"integer actions of shape \(2,\), got float64"),
        (np.array(0), r"of shape \(2,\), got int64 of \(\)"),
    ],
)
def test_a_wrong_action_is_refused_with_what_was_expected(action: np.ndarray, message: str) -> None:
    env = Catch(2)
    env.reset(0)
    with pytest.raises(ValueError, match=message):
        env.step(action)


# --- BitFlip


def test_flipping_the_bits_that_differ_reaches_the_goal_in_as_many_steps() -> None:
    env = BitFlip(20, bits=6)
    seen = env.reset(0)
    assert isinstance(seen, dict)
    differ = (seen["observation"] != seen["desired_goal"]).sum(axis=1)
    assert differ.min() >= 1 and len(set(differ.tolist())) > 2
    for step_number in range(1, int(differ.max()) + 1):
        action = (seen["observation"] != seen["desired_goal"]).argmax(axis=1)
        step = env.step(action)
        running = differ >= step_number
        assert (step.terminated[running] == (differ[running] == step_number)).all()
        assert (step.reward[running] == np.where(differ[running] == step_number, 0, -1)).all()
        assert not step.truncated[running].any()
        seen = step.observation
        assert isinstance(seen, dict)


def test_a_game_that_does_not_reach_its_goal_is_truncated_and_shows_its_last_bits() -> None:
    env = BitFlip(1, bits=3)
    first = env.reset(1)
    assert isinstance(first, dict)
    bits, goal = first["observation"][0].copy(), first["desired_goal"][0].copy()
    lost_streams = int((bits == goal).argmax()) if (bits == goal).any() else 0
    steps = [env.step(np.array([lost_streams])) for _ in range(2)]
    assert not any(step.terminated.any() or step.truncated.any() for step in steps)
    assert (steps[1].observation["observation"][0] == bits).all()  # type: ignore[call-overload,index]
    last = env.step(np.array([lost_streams]))
    final = last.final_observation
    assert last.truncated.tolist() == [True] and isinstance(final, dict)
    bits[lost_streams] = 1 - bits[lost_streams]
    assert (final["achieved_goal"][0] == bits).all() and (final["desired_goal"][0] == goal).all()
    assert first["observation"][0].tolist() != bits.tolist(), "what it gave is the caller's"
