# SPDX-License-Identifier: Apache-2.0
"""The compliance suite of vector environments.

Inherit and say how to make one:

    class TestMyEnv(VecEnvCompliance):
        def make(self, num_envs): return MyEnv(num_envs)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2
from torchbeast.core.envs import spaces
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.vec_env import VecEnv

NUM_ENVS = 2


def play(env: VecEnv, num_steps: int, seed: int = 0) -> Iterator[VecStep]:
    """Returns the results of random actions, the same for the same seed."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        yield env.step(random_action(env.action_space, env.num_envs, rng))


class VecEnvCompliance:
    num_steps = 300  # enough for an episode to end

    def make(self, num_envs: int) -> VecEnv:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def env(cls) -> Iterator[VecEnv]:
        """The environment of all tests, because some take long to make; each test resets it."""
        env = cls().make(NUM_ENVS)
        yield env
        env.close()

    def test_num_envs_is_the_number_that_was_asked_for(self, env: VecEnv) -> None:
        assert env.num_envs == NUM_ENVS
        assert env.env_id and env.frame_stack >= 1

    def test_the_action_space_survives_json(self, env: VecEnv) -> None:
        data = spaces.space_to_json(env.action_space)
        assert spaces.space_from_json(data) == env.action_space

    def test_observations_match_the_observation_space(self, env: VecEnv) -> None:
        _check_rows(env.observation_space, env.reset(0), NUM_ENVS)
        for step in play(env, self.num_steps):
            _check_rows(env.observation_space, step.observation, NUM_ENVS)

    def test_rewards_are_finite_float32_and_ends_are_bool(self, env: VecEnv) -> None:
        env.reset(0)
        for step in play(env, self.num_steps):
            assert step.reward.dtype == np.float32 and step.reward.shape == (NUM_ENVS,)
            assert np.isfinite(step.reward).all()
            for flag in (step.terminated, step.truncated, step.episode_end):
                assert flag.dtype == bool and flag.shape == (NUM_ENVS,)

    def test_an_end_is_either_terminated_or_truncated(self, env: VecEnv) -> None:
        env.reset(0)
        ended = 0
        for step in play(env, self.num_steps):
            assert not (step.terminated & step.truncated).any()
            assert not (step.episode_end & ~(step.terminated | step.truncated)).any()
            assert not (step.truncated & ~step.episode_end).any()
            ended += int((step.terminated | step.truncated).sum())
        assert ended, "nothing ended: raise num_steps"

    def test_there_is_one_final_observation_for_each_truncated_episode(self, env: VecEnv) -> None:
        env.reset(0)
        for step in play(env, self.num_steps):
            if step.truncated.any():
                _check_rows(env.observation_space, step.final_observation, step.truncated.sum())
            else:
                assert step.final_observation is None

    def test_the_same_seed_gives_the_same_play(self, env: VecEnv) -> None:
        first, again = self._recording(env, seed=7), self._recording(env, seed=7)
        assert len(first) > self.num_steps
        map_leaves2(np.testing.assert_array_equal, first, again)

    def test_another_instance_with_the_same_seed_gives_the_same_play(self, env: VecEnv) -> None:
        other = self.make(NUM_ENVS)
        first, second = self._recording(env, seed=7), self._recording(other, seed=7)
        other.close()
        map_leaves2(np.testing.assert_array_equal, first, second)

    def test_another_seed_gives_another_play(self, env: VecEnv) -> None:
        first, second = self._recording(env, seed=7), self._recording(env, seed=8)
        assert any((a != b).any() for a, b in zip(first, second, strict=True))

    def test_each_environment_has_a_seed_of_its_own(self, env: VecEnv) -> None:
        """Only the seeds differ: all environments get the same actions."""
        rng = np.random.default_rng(0)
        recording = flatten(env.reset(7))
        for _ in range(self.num_steps):
            action = random_action(env.action_space, 1, rng)
            alike = map_leaves(lambda leaf: np.repeat(leaf, NUM_ENVS, axis=0), action)
            recording += flatten(env.step(alike).observation)
        assert any((leaf[:1] != leaf[1:]).any() for leaf in recording)

    def test_returned_arrays_are_not_changed_by_later_steps(self, env: VecEnv) -> None:
        returned: list[Any] = [env.reset(0)]
        kept = copy.deepcopy(returned)
        for step in play(env, self.num_steps):
            returned.append(tuple(step))
            kept.append(copy.deepcopy(tuple(step)))
        env.reset(1)
        for a, b in zip(returned, kept, strict=True):
            map_leaves2(np.testing.assert_array_equal, a, b)

    def test_a_step_does_not_change_the_actions(self, env: VecEnv) -> None:
        env.reset(0)
        action = random_action(env.action_space, NUM_ENVS, np.random.default_rng(0))
        kept = copy.deepcopy(action)
        env.step(action)
        map_leaves2(np.testing.assert_array_equal, action, kept)

    def test_actions_for_another_number_of_environments_are_refused(self, env: VecEnv) -> None:
        env.reset(0)
        action = random_action(env.action_space, NUM_ENVS + 1, np.random.default_rng(0))
        with pytest.raises(ValueError, match=str(NUM_ENVS)):
            env.step(action)

    def _recording(self, env: VecEnv, seed: int) -> list[np.ndarray]:
        """Returns all observation leaves and rewards of one play with constant actions."""
        recording = flatten(env.reset(seed))
        for step in play(env, self.num_steps):
            recording += [*flatten(step.observation), step.reward]
        return recording


def _check_rows(space: spaces.ObservationSpace, observation: Any, num_rows: int) -> None:
    """Raises unless every leaf is [num_rows, *shape] of its dtype."""
    for leaf in flatten(observation):
        assert isinstance(leaf, np.ndarray) and leaf.shape[0] == num_rows
    first_rows = map_leaves(lambda leaf: leaf[0], observation)
    assert len(list(spaces.matching_leaves(space, first_rows, "row 0"))) == len(flatten(space))
