# SPDX-License-Identifier: Apache-2.0
"""The loop over environments: rows, counters, stacks, actions and state, by their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from source_envs import NOTHING, SCHEDULES, Counting, Nested, Numbered, Stacked, reward_of
from source_models import CountingNet

from torchbeast.core.actors.env_loop import EnvLoop, inputs_of
from torchbeast.core.base.nest import map_leaves2
from torchbeast.core.envs.contract import is_reset
from torchbeast.core.envs.spaces import Box, MultiDiscrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv


def loop_over(env: VecEnv) -> EnvLoop:
    model = CountingNet(env.observation_space, env.action_space, use_lstm=True)
    return EnvLoop(env, model, seed=3)


def test_the_first_row_starts_every_environment() -> None:
    loop = loop_over(Counting(4))
    row = loop.row
    assert row.done.all() and not row.truncated.any() and not row.episode_end.any()
    assert not (row.reward.any() or row.episode_step.any() or row.episode_return.any())
    assert row.reward.dtype == row.episode_return.dtype == np.float32
    assert row.episode_step.dtype == np.int32
    assert row.final_observation is None
    assert loop.acted.action.tolist() == [[0, 0, 0, 0]]
    shapes = {name: extra.shape for name, extra in loop.acted.extras.items()}
    assert shapes == {"policy_logits": (1, 4, 4), "baseline": (1, 4)}
    assert loop.acted.state.eq(0).all()


def test_games_are_counted_over_lives_and_anew_after_their_end() -> None:
    """Environment 2: lives of 2, 2 and 3 steps are one game; reward is 3 * time - 2.5."""
    loop = loop_over(Counting(3))
    steps, returns, ends = [], [], []
    for _ in range(9):
        loop.act("sample")
        loop.step()
        steps.append(int(loop.row.episode_step[2]))
        returns.append(float(loop.row.episode_return[2]))
        ends.append((bool(loop.row.done[2]), bool(loop.row.episode_end[2])))
    assert steps == [1, 2, 3, 4, 5, 6, 7, 1, 2]
    lives = [time for length, _ in SCHEDULES[2] for time in range(1, length + 1)]
    rewards = [reward_of(2, time) for time in [*lives, 1, 2]]
    expected = np.cumsum(rewards[:7]).tolist() + np.cumsum(rewards[7:]).tolist()
    assert returns == expected
    life, over, on = (True, False), (True, True), (False, False)
    assert ends == [on, life, on, life, on, on, over, on, life]


def test_a_row_that_only_begins_a_life_is_a_reset_row() -> None:
    """EnvPool in wrappers has such rows: the game goes on, but nobody may learn from them."""
    env, never = Counting(1), np.zeros(1, bool)
    loop = loop_over(env)
    give, rows = env.step, []
    for ends, begins in ((never, never), (~never, never), (never, ~never), (never, never)):
        env.step = lambda action, e=ends, b=begins: give(action)._replace(  # type: ignore[method-assign,misc]
            terminated=e | b, episode_end=never, resets=b
        )
        loop.act("sample")
        loop.step()
        step = loop.row.episode_step
        rows.append((bool(is_reset(loop.row.done, step)[0]), int(step[0])))
    assert rows == [(False, 1), (False, 2), (True, 0), (False, 3)]


def test_the_return_of_a_long_game_still_grows() -> None:
    """A float32 of 2**24 does not grow by 1."""
    env = Counting(1)
    loop = loop_over(env)
    give = env.step
    for reward in (2.0**24, 1.0, 1.0):
        env.step = lambda action, r=reward: give(action)._replace(  # type: ignore[method-assign]
            reward=np.array([r], np.float32), episode_end=np.zeros(1, bool)
        )
        loop.act("sample")
        loop.step()
    assert loop.row.episode_return.tolist() == [2**24 + 2]


def test_rows_that_were_kept_are_not_written_to() -> None:
    loop = loop_over(Counting(2))
    kept = []
    for _ in range(5):
        loop.act("sample")
        loop.step()
        kept.append((loop.row, [np.copy(leaf) for leaf in loop.row[:-1]]))
    for row, copies in kept:
        for leaf, copy in zip(row[:-1], copies, strict=True):
            np.testing.assert_array_equal(leaf, copy)


def test_stacks_begin_anew_and_final_ones_end_in_the_last_frame() -> None:
    loop = loop_over(Stacked(2))
    assert loop.row.observation[1, :, 0, 0].tolist() == [0, 0, 0]
    seen, finals = [], []
    for _ in range(5):
        loop.act("sample")
        loop.step()
        seen.append(loop.row.observation[1, :, 0, 0].tolist())
        if loop.row.final_observation is not None:
            finals.append(loop.row.final_observation[:, :, 0, 0].tolist())
    assert seen == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0], [0, 0, 1]]
    assert finals == [[[2, 3, 4]]]


def test_the_state_moves_with_every_action_and_is_forgotten_at_ends() -> None:
    loop = loop_over(Counting(2))
    states = []
    for _ in range(5):
        loop.act("sample")
        states.append(loop.acted.state[0, :, 0].tolist())
        loop.step()
    assert states == [[1, 1], [2, 2], [3, 3], [1, 4], [2, 1]]


def test_the_model_is_given_the_row_and_the_action_that_led_to_it() -> None:
    class Watching(CountingNet):
        def forward(self, inputs: Any, core_state: Any) -> Any:
            seen.append((inputs.observation, inputs.last_action))
            return super().forward(inputs, core_state)

    seen: list[Any] = []
    env = Numbered(2)
    model = Watching(env.observation_space, env.action_space, use_lstm=True)
    loop = EnvLoop(env, model, seed=0)
    for _ in range(8):
        loop.act("sample")
        loop.step()
    assert seen[0][1].tolist() == [[0, 0]]
    for observation, last_action in seen[1:]:
        assert observation.shape == (1, 2, 3)
        assert observation[..., 2].tolist() == last_action.tolist()


def test_inputs_of_an_observation_that_is_read_only_can_be_written_to() -> None:
    observation, rewards = np.ones((2, 3), np.float32), np.zeros(2, np.float32)
    observation.flags.writeable = False
    seen = inputs_of(observation, rewards, rewards == 0, torch.zeros(1, 2)).observation
    assert isinstance(seen, torch.Tensor)
    seen += 1
    assert observation.max() == 1


def test_greedy_actions_are_the_modes() -> None:
    class Sure(CountingNet):
        def forward(self, inputs: Any, core_state: Any) -> Any:
            output = super().forward(inputs, core_state)
            output.policy_logits[..., 2] = 0.01
            return output

    env = Numbered(50)
    model = Sure(env.observation_space, env.action_space, use_lstm=True)
    loop = EnvLoop(env, model, seed=0)
    loop.act("greedy")
    assert loop.acted.action.eq(2).all()
    loop.act("sample")
    assert len(loop.acted.action.unique()) == 4


def test_nested_actions_reach_the_environment_as_they_were_chosen() -> None:
    env = SyncVecEnv([Nested] * 2, "Nested")
    loop = loop_over(env)
    map_leaves2(
        lambda leaf, zero: np.testing.assert_array_equal(leaf[0], zero),
        loop.row.observation["shown"],
        NOTHING,
    )
    loop.act("sample")
    loop.step()
    shown, chosen = loop.row.observation["shown"], loop.acted.action
    for name in ("choice", "switches"):
        np.testing.assert_array_equal(shown[name], chosen[name][0].numpy())
    pair, number = chosen["levers"]
    np.testing.assert_array_equal(shown["levers"][0], pair[0].numpy())
    np.testing.assert_array_equal(shown["levers"][1], number[0].clamp(-0.5, 0.5).numpy())


@pytest.mark.parametrize("space", [MultiDiscrete((3, 5)), Box(-1.0, 1.0, (2,))])
def test_an_environment_may_write_to_the_action_it_is_given(space: Any) -> None:
    class Overwriting(Numbered):
        action_space = space

        def step(self, action: Any) -> Any:
            result = super().step(np.zeros(self.num_envs))
            action[...] = 77
            return result

    loop = loop_over(Overwriting(2))
    loop.act("sample")
    chosen = torch.clone(loop.acted.action)
    loop.step()
    assert torch.equal(loop.acted.action, chosen)


def test_the_actor_knows_the_numbers_of_its_environments() -> None:
    """A ladder of epsilons goes by them."""
    env = Counting(3)
    model = CountingNet(env.observation_space, env.action_space, use_lstm=True)
    EnvLoop(env, model, seed=3, first_env=4)
    assert model.env_index is not None and model.env_index.tolist() == [4, 5, 6]
