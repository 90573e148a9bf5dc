# SPDX-License-Identifier: Apache-2.0
"""EnvPool's tasks play as the same pool stepped by hand; other pools and ids are refused.

A small pool of Python stands in for EnvPool where a test does not need it.
"""

from __future__ import annotations

import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

import torchbeast.envs.spec
from torchbeast import envs
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.gym_vector import EnvPoolEnv
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.sync_vec_env import environment_seeds
from torchbeast.envs.spec import plays_atari
from torchbeast.errors import UsageError
from torchbeast.run.config import resolved

E = 3


class Config(NamedTuple):
    num_envs: int = 1
    batch_size: int = 0
    num_threads: int = 1
    max_num_players: int = 1
    seed: int = 42
    env_seed: Any = ()
    lives: int = 2


class Spec:
    def __init__(self, config: Any) -> None:
        self.config = config

    @staticmethod
    def gen_config(**kwargs: Any) -> Config:
        return Config(**kwargs)


class EnvPoolMixin:
    """Gives a class the name by which pools are known."""


class DMPool(EnvPoolMixin):
    num_envs = 1

    def reset(self) -> None: ...
    def step(self) -> None: ...


class Pool(EnvPoolMixin):
    """Action 1 loses a life. Observed are the seed, the games and the steps of this life."""

    single_observation_space = gymnasium.spaces.Box(0, 2**31, (3,), np.int64)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, spec: Spec) -> None:
        self.spec, self.config = spec, spec.config._asdict()
        self.num_envs = int(spec.config.num_envs)
        self.state = np.zeros((self.num_envs, 3), np.int64)
        if self.config.get("env_seed"):
            self.state[:, 0] = self.config["env_seed"]
        self.lives = np.zeros(self.num_envs, np.int64)
        self.ended = np.ones(self.num_envs, bool)

    def reset(self) -> Any:
        observation, *_, info = self.step(np.zeros(self.num_envs, np.int64))
        return observation, info

    def step(self, actions: Any, env_id: Any = None) -> Any:
        ids = np.arange(self.num_envs) if env_id is None else env_id
        fresh = self.ended[ids]
        over = self.lives[ids] == 0
        self.state[ids, 1] += over
        self.state[ids, 2] = np.where(fresh, 0, self.state[ids, 2] + 1)
        lost = (actions == 1) & ~fresh
        self.lives[ids] = np.where(over, self.config.get("lives", 0), self.lives[ids] - lost)
        self.ended[ids] = lost
        lives = self.lives[ids]
        info = {"terminated": (lives == 0).astype(np.int32), "lives": lives}
        return self.state[ids], np.ones(len(ids)), lost, np.zeros(len(ids), bool), info

    def close(self) -> None:
        pass


def make_pool(num_envs: int, **config: Any) -> Pool:
    return Pool(Spec(Config(num_envs, **config)))


def make_dm_pool(num_envs: int) -> DMPool:
    return DMPool()


def make_larger_pool(num_envs: int) -> Pool:
    return make_pool(num_envs + 1)


class Wrapped:
    """A vector environment of somebody's own, around a pool."""

    metadata: ClassVar = {"autoreset_mode": "NextStep"}

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_envs = inner, inner.num_envs
        self.single_observation_space = inner.single_observation_space
        self.single_action_space = inner.single_action_space

    def reset(self, *, seed: int | None = None) -> Any:
        return self.inner.reset()

    def step(self, actions: Any) -> Any:
        assert len(actions) == self.num_envs
        return self.inner.step(actions)

    def close(self) -> None:
        self.inner.close()


def make_wrapped_pool(num_envs: int, **config: Any) -> Wrapped:
    return Wrapped(Wrapped(make_pool(num_envs, **config)))


def make_wrapped_dm_pool(num_envs: int) -> Any:
    return SimpleNamespace(num_envs=num_envs, pool=DMPool())


def make_single() -> Any:
    wrapper = gymnasium.Env()  # type: ignore[var-annotated]
    wrapper.pool, wrapper.action_space = make_pool(1), Pool.single_action_space  # type: ignore[attr-defined]
    return wrapper


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the pools of this file in the place of EnvPool."""

    def make(task: str, *, env_type: str, **config: Any) -> Pool:
        if not isinstance(config.get("lives", 1), int):
            raise TypeError("lives must be int.\nA second line")
        return make_pool(**config)

    package = SimpleNamespace(
        list_all_envs=lambda: ["Lives-v0"],
        make_spec=lambda task, from_pixels: Spec(Config()),
        make=make,
    )
    monkeypatch.setitem(sys.modules, "envpool", package)
    monkeypatch.setattr(torchbeast.envs.spec, "find_spec", lambda name: package)


def test_an_ended_environment_is_reset_in_the_same_step_and_only_it(fake: None) -> None:
    env = envs.make("envpool:Lives-v0", E)
    assert isinstance(env, EnvPoolEnv) and env.num_envs == E
    first = env.reset(5)
    seeds = environment_seeds(5, E)
    assert [tuple(row) for row in first] == [(seed, 1, 0) for seed in seeds]
    step = env.step(np.array([0, 1, 0]))
    assert [tuple(row[1:]) for row in step.observation] == [(1, 1), (1, 0), (1, 1)]
    assert step.terminated.tolist() == [False, True, False]


def test_a_pool_in_wrappers_takes_the_runs_seeds_and_begins_as_they_do(fake: None) -> None:
    env = envs.make(envs.EnvSpec(f"{__name__}:make_wrapped_pool", {"lives": 2}), E)
    assert isinstance(env, EnvPoolEnv)
    for seed in (5, 6):
        assert [row[0] for row in env.reset(seed)] == environment_seeds(seed, E)
    life = env.step(np.array([0, 1, 0]))
    assert life.terminated.tolist() == [False, True, False] and not life.episode_end.any()
    assert life.observation[1].tolist()[1:] == [1, 1]  # still the last one of this life
    late = env.step(np.array([0, 1, 0]))
    assert late.resets is not None and late.resets.tolist() == [False, True, False]
    assert late.observation[1].tolist()[1:] == [1, 0] and not late.episode_end.any()
    game = env.step(np.array([0, 1, 0]))
    assert game.episode_end.tolist() == [False, True, False]
    assert env.final_info == {1: {"terminated": 1, "lives": 0}}
    assert not env.step(np.zeros(E, np.int64)).episode_end.any()
    with pytest.raises(ValueError, match="expected actions between 0 and 1"):
        env.step(np.full(E, 2))


def test_a_task_may_have_its_family_in_front(fake: None) -> None:
    assert envs.make("envpool:toys/Lives-v0", 1).env_id == "envpool:toys/Lives-v0"


def test_an_episode_ends_with_the_game_and_not_with_a_life(fake: None) -> None:
    env = envs.make(envs.EnvSpec("envpool:Lives-v0", {"lives": 2}), 2)
    assert isinstance(env, EnvPoolEnv)
    env.reset(0)
    life = env.step(np.array([1, 0]))
    assert life.terminated.tolist() == [True, False] and not life.episode_end.any()
    assert env.final_info == {}
    game = env.step(np.array([1, 1]))
    assert game.terminated.tolist() == [True, True]
    assert game.episode_end.tolist() == [True, False]
    assert env.final_info == {0: {"terminated": 1, "lives": 0}}
    assert game.observation[:, 1].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("envpool:Live-v0", {}, "EnvPool has no task Live-v0; did you mean Lives-v0"),
        ("envpool:Lives", {}, "EnvPool has no task Lives; did you mean Lives-v0"),
        ("envpool:Lives-v0", {"max_num_players": 2}, "one agent, got one of up to 2 players"),
        ("envpool:Lives-v0", {"lives": "x"}, 'lives="x": TypeError: lives must be int.$'),
        (f"{__name__}:make_larger_pool", {}, "num_envs=3, .* got .*Pool with num_envs=4"),
        (f"{__name__}:make_pool", {"batch_size": 2}, "got batch_size=2 with num_envs=3: remove"),
        (f"{__name__}:make_dm_pool", {}, 'DMPool: make it with env_type="gymnasium"'),
        (f"{__name__}:make_wrapped_dm_pool", {}, 'DMPool: make it with env_type="gymnasium"'),
        (f"{__name__}:make_wrapped_pool", {"batch_size": 2}, "got batch_size=2 with num_envs=3"),
        (f"{__name__}:make_single", {}, "has a pool of EnvPool: add a parameter num_envs"),
    ],
)
def test_what_cannot_be_used_is_refused(
    fake: None, env_id: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        envs.make(envs.EnvSpec(env_id, kwargs), E)


def test_options_of_ale_name_envpools_instead() -> None:
    options = envs.EnvOptions(sticky_actions=0.25)
    with pytest.raises(envs.EnvError, match="env_kwargs, such as repeat_action_probability"):
        envs.make(envs.EnvSpec("envpool:Pong-v5", options=options), 1)


def test_without_envpool_its_ids_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchbeast.envs.spec, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match=r"pip install 'torchbeast\[envpool\]'"):
        envs.make("envpool:CartPole-v1", 1)


def test_only_rewards_of_its_atari_games_are_clipped() -> None:
    assert plays_atari("envpool:MsPacman-v5") and not plays_atari("envpool:HalfCheetah-v5")
    assert resolved("auto", "envpool:Pong-v5") == "abs_one"
    assert resolved("auto", "envpool:CartPole-v1") == "none"


def test_cartpole_gives_the_steps_of_the_same_pool_stepped_by_hand() -> None:
    """EnvPool resets an environment in the step after the end."""
    envpool = pytest.importorskip("envpool")
    arguments = {"env_type": "gymnasium", "max_episode_steps": 20}
    env = envs.make(envs.EnvSpec("envpool:CartPole-v1", {"max_episode_steps": 20}), E)
    pools = [  # single ones: only an ended one takes the step that resets it
        envpool.make("CartPole-v1", num_envs=1, seed=[seed], **arguments)
        for seed in environment_seeds(7, E)
    ]
    with closing(env):
        firsts = [pool.reset()[0] for pool in pools]
        np.testing.assert_array_equal(env.reset(7), np.concatenate(firsts))
        random, ends, cuts = np.random.default_rng(0), 0, 0
        for _ in range(150):
            actions = random_action(env.action_space, E, random)
            step = env.step(actions)
            finals = []
            for index, pool in enumerate(pools):
                seen, reward, terminated, truncated, _ = pool.step(actions[index : index + 1])
                assert step.reward[index] == reward[0]
                assert step.terminated[index] == terminated[0]
                assert step.truncated[index] == truncated[0]
                assert step.episode_end[index] == (terminated[0] or truncated[0])
                finals += [seen[0]] if truncated[0] else []
                if terminated[0] or truncated[0]:
                    seen, *_ = pool.step(np.zeros(1, np.int64))
                np.testing.assert_array_equal(step.observation[index], seen[0])
                ends, cuts = ends + int(terminated[0]), cuts + int(truncated[0])
            if finals:
                np.testing.assert_array_equal(step.final_observation, np.stack(finals))
    assert ends > 2 and cuts > 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda pool: pool,
        gymnasium.wrappers.vector.RecordEpisodeStatistics,
        gymnasium.Wrapper,
        lambda pool: OfStableBaselines(pool),
    ],
)
def test_a_ready_pool_in_any_wrapper_is_an_env_fn_and_takes_the_runs_seeds(wrap: Any) -> None:
    envpool = pytest.importorskip("envpool")

    def make_ready(num_envs: int) -> Any:
        return wrap(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs))

    factory, _, _ = VecEnv.create_factory(env_fn=make_ready, vec_env_size=2)
    with closing(factory()) as ready, closing(envs.make("envpool:CartPole-v1", 2)) as by_id:
        for seed in (5, 6):
            np.testing.assert_array_equal(ready.reset(seed), by_id.reset(seed))
        for _ in range(8):  # CartPole does not fall before
            found, expected = (env.step(np.zeros(2, np.int64)) for env in (ready, by_id))
            np.testing.assert_array_equal(found.observation, expected.observation)


class OfStableBaselines:
    """A wrapper of a pool that has the interface of Stable-Baselines3."""

    def __init__(self, venv: Any) -> None:
        self.venv, self.num_envs = venv, venv.num_envs
        self.observation_space, self.action_space = venv.observation_space, venv.action_space

    def seed(self, seed: int) -> None: ...

    def reset(self) -> Any:
        return self.venv.reset()[0]

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        observation, reward, terminated, truncated, _ = self.venv.step(self.actions)
        return observation, reward, terminated | truncated, [{}] * self.num_envs

    def step(self, actions: Any) -> Any:
        self.step_async(actions)
        return self.step_wait()

    def close(self) -> None:
        self.venv.close()


@pytest.mark.parametrize("task", ["RubiksCube-v0", "MultiCVRP-v0", "Connector-v2"])
def test_a_task_with_a_box_of_integers_as_actions_has_a_policy(task: str) -> None:
    pytest.importorskip("envpool")
    with closing(envs.make(f"envpool:{task}", 2)) as env:
        policy = distribution_for(env.action_space)
        env.reset(0)
        for _ in range(20):
            env.step(map_leaves(np.asarray, policy.sample(torch.zeros(2, policy.num_params))))


def test_frames_of_atari_are_sent_one_by_one() -> None:
    pytest.importorskip("envpool")
    kwargs = {"stack_num": 3, "episodic_life": True, "img_height": 42, "img_width": 42}
    with closing(envs.make(envs.EnvSpec("envpool:Breakout-v5", kwargs), 2)) as env:
        assert env.frame_stack == 3 and env.reset(0).shape == (2, 1, 42, 42)
        random, lives, games = np.random.default_rng(0), 0, 0
        for _ in range(600):
            step = env.step(random_action(env.action_space, 2, random))
            lives, games = lives + int(step.terminated.sum()), games + int(step.episode_end.sum())
            assert (step.episode_end <= step.terminated).all()
        assert games > 1 and lives >= 5 * games
