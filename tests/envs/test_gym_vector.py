# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's own vector environments, beside the same environments in a SyncVecEnv."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from torchbeast import envs
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.gym_vector import GymVectorEnv
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.vec_env import SyncVecEnv, vec_env_of

E = 3
MODES = list(AutoresetMode)


class Dicts(gymnasium.Env):  # type: ignore[type-arg]
    """Nested actions and observations; episodes of 1 to 5 steps end in either way, with an info."""

    observation_space = gymnasium.spaces.Dict(
        {
            "z": gymnasium.spaces.Box(-1.0, 9.0, (2,)),
            "a": gymnasium.spaces.Tuple(
                [gymnasium.spaces.Discrete(7), gymnasium.spaces.Box(0, 255, (2, 3), np.uint8)]
            ),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {"move": gymnasium.spaces.Discrete(3), "force": gymnasium.spaces.Box(-0.5, 0.5, (2,))}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(1, 6))
        return self._seen(), {"first": 1}

    def step(self, action: Any) -> Any:
        assert np.abs(action["force"]).max() <= 0.5
        self.time += 1
        over = self.time == self.length
        info = {"length": self.time, "word": "x", "none": None} if over else {"length": -1}
        reward = float(action["move"] + action["force"].sum())
        return self._seen(), reward, over and self.length % 2 == 0, over, info

    def _seen(self) -> Any:
        picture = self.np_random.integers(0, 255, (2, 3)).astype(np.uint8)
        return {"z": np.full(2, self.time, np.float32), "a": (np.int64(self.time), picture)}


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=14)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=4)


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(flatten(found), flatten(expected), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def check_alike(make: Callable[[], Any], made: Any) -> None:
    ours, theirs = SyncVecEnv([make] * E, "x"), GymVectorEnv(made, "x")
    random = np.random.default_rng(0)
    with closing(ours), closing(theirs):
        assert theirs.observation_space == ours.observation_space
        assert theirs.action_space == ours.action_space
        assert_same(theirs.reset(5), ours.reset(5))
        held, ends = [], 0
        for _ in range(40):
            action = random_action(ours.action_space, E, random)
            expected, found = ours.step(action), theirs.step(action)
            assert_same(found[:5], expected[:5])
            assert (found.final_observation is None) == (expected.final_observation is None)
            if expected.final_observation is not None:
                assert_same(found.final_observation, expected.final_observation)
                held.append((found.final_observation, expected.final_observation))
            held.append((found.observation, expected.observation))
            assert theirs.final_info.keys() == ours.final_info.keys()
            for index, info in ours.final_info.items():
                given = theirs.final_info[index]
                assert {key: given[key] for key in info} == info
                ends += 1
        assert ends > 4
        for found_one, expected_one in held:
            assert_same(found_one, expected_one)  # no later step has written to it


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [cartpole, pendulum, Dicts])
def test_a_sync_vector_env_gives_the_steps_of_its_environments(make: Any, mode: Any) -> None:
    check_alike(make, SyncVectorEnv([make] * E, autoreset_mode=mode, copy=False))


@pytest.mark.parametrize(("make", "mode"), list(zip([cartpole, pendulum, Dicts], MODES)))  # noqa: B905
def test_an_async_vector_env_does_too(make: Any, mode: Any) -> None:
    check_alike(make, AsyncVectorEnv([make] * E, autoreset_mode=mode, copy=False))


def test_make_vec_is_an_env_fn_as_it_is() -> None:
    arguments = {"id": "CartPole-v1", "vectorization_mode": "sync", "max_episode_steps": 14}
    factory, _, _ = VecEnv.create_factory(
        env_fn=gymnasium.make_vec, env_kwargs=arguments, vec_env_size=2, info_keywords=["x"]
    )
    with closing(factory()) as env:
        assert isinstance(env, GymVectorEnv) and env.num_envs == 2
    spec = envs.EnvSpec("gymnasium:make_vec", arguments)
    with closing(envs.make(spec, E)) as env:
        assert env.num_envs == E and env.reset(1).shape == (E, 4)  # type: ignore[union-attr]


def fixed(**arguments: Any) -> Callable[..., Any]:
    return lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs, **arguments)


def test_what_cannot_be_reset_in_time_is_refused() -> None:
    own = fixed(vectorization_mode="vector_entry_point")
    for late in (own, lambda num_envs: AsyncVectorEnv([cartpole] * num_envs, shared_memory=False)):
        with pytest.raises(ValueError, match='late .*vectorization_mode="sync" or "async"'):
            vec_env_of(late, {}, 1, "x")
    older = SyncVectorEnv([cartpole])
    del older.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match="no autoreset_mode of Gymnasium 1.1 or newer, got None"):
        vec_env_of(lambda num_envs: older, {}, 1, "x")


def test_a_vector_environment_in_place_of_a_single_one_is_refused() -> None:
    with pytest.raises(ValueError, match="is a vector environment itself: let the function"):
        vec_env_of(lambda: SyncVectorEnv([cartpole]), {}, 1, "x")
    with pytest.raises(ValueError, match="called with num_envs=2, the factory must return"):
        vec_env_of(lambda num_envs: SyncVectorEnv([cartpole] * 3), {}, 2, "x")


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    class Endless(gymnasium.RewardWrapper):  # type: ignore[type-arg]
        def reward(self, reward: Any) -> Any:
            return np.inf

    env = GymVectorEnv(SyncVectorEnv([cartpole, lambda: Endless(cartpole())]), "x")
    env.reset(0)
    with pytest.raises(ValueError, match="environment 1 of x: expected a finite reward, got inf"):
        env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "at"), [(cartpole, 3), (pendulum, 4)])
def test_an_observation_that_is_not_finite_is_an_error(make: Any, mode: Any, at: int) -> None:
    """Pendulum's step 4 is the last one of an episode that its time limit cuts."""

    class Diverging(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
        time = -1

        def observation(self, observation: Any) -> Any:
            self.time += 1
            return observation + (np.nan if self.time == at else 0)

    env = GymVectorEnv(SyncVectorEnv([make, lambda: Diverging(make())], autoreset_mode=mode), "x")
    env.reset(0)
    action = random_action(env.action_space, 2, np.random.default_rng(0))
    message = f"^environment 1 of x, step {at} of the episode: expected finite float32 in the obs"
    with pytest.raises(ValueError, match=message):
        for _ in range(5):
            env.step(action)
