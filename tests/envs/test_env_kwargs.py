# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of a spec reach the environment, and wrong ones are refused."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from example_envs import Counting

from torchbeast import envs
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs import EnvOptions, EnvSpec
from torchbeast.envs.toy import Mock


class Sized(Counting):
    """An environment with an observation of `size` numbers."""

    def __init__(self, size: int, fill: float = 0.0) -> None:
        super().__init__()
        self.size, self.fill = size, fill

    def observation(self) -> Any:
        return np.full(self.size, self.fill, np.float32)


def vector(num_envs: int, episode_length: int = 3) -> VecEnv:
    return Mock(num_envs, episode_length)


SIZED = f"{__name__}:Sized"
VECTOR = f"{__name__}:vector"


def test_an_env_spec_goes_through_json_with_its_options() -> None:
    options = EnvOptions(observation_keys=("a", "b/c"), sticky_actions=0.25)
    spec = EnvSpec("my_module:make", {"size": 8}, options=options)
    sent = json.loads(json.dumps(spec.as_json()))
    assert EnvSpec.from_json(sent) == EnvSpec.from_parent(sent) == spec
    assert EnvSpec.from_json({"name": "Catch"}) == EnvSpec("Catch")


def test_keyword_arguments_reach_a_users_factory() -> None:
    with closing(envs.make(EnvSpec(SIZED, {"size": 8, "fill": 0.5}), 3)) as env:
        assert env.observation_space == ArraySpec((8,), "float32")
        assert (env.reset(0) == np.full((3, 8), 0.5)).all()


def test_keyword_arguments_reach_a_users_vector_environment() -> None:
    env = envs.make(EnvSpec(VECTOR, {"episode_length": 2}), 5)
    env.reset(0)
    ended = [env.step(np.zeros(5, np.int64)).episode_end.all() for _ in range(4)]
    assert ended == [False, True, False, True]


def test_a_callable_that_cannot_be_imported_by_name_makes_environments() -> None:
    pytest.importorskip("cloudpickle")
    sizes = [4]
    spec = EnvSpec.of(lambda fill: Sized(sizes[0], fill), {"fill": 2.0})
    sent = EnvSpec.from_parent(json.loads(json.dumps(spec.as_json())))
    with closing(envs.make(sent, 2)) as env:
        assert (env.reset(0) == np.full((2, 4), 2.0)).all()
        assert "lambda" in env.env_id


def test_keyword_arguments_reach_gymnasiums_make() -> None:
    """Tests arguments of the constructor, and the time limit, an argument of gymnasium.make."""
    with closing(envs.make(EnvSpec("FrozenLake-v1", {"map_name": "8x8"}), 1)) as env:
        assert env.observation_space.categories == (64,)
    with closing(envs.make(EnvSpec("CartPole-v1", {"max_episode_steps": 2}), 1)) as env:
        env.reset(0)
        truncated = [bool(env.step(np.zeros(1, np.int64)).truncated[0]) for _ in range(4)]
    assert truncated == [False, True, False, True]


def test_keyword_arguments_reach_built_in_environments() -> None:
    assert envs.make(EnvSpec("Catch", {"rows": 6, "columns": 7}), 1).observation_space.shape == (
        6,
        7,
    )
    for env_id in ("Mock", "Memory"):
        env = envs.make(EnvSpec(env_id, {"episode_length": 2}), 1)
        env.reset(0)
        assert [bool(env.step(np.zeros(1, np.int64)).episode_end) for _ in range(2)] == [0, 1]


def test_keyword_arguments_reach_a_game_of_minatar() -> None:
    pytest.importorskip("minatar")
    env: Any = envs.make(EnvSpec("MinAtar/Breakout-v1", {"sticky_action_prob": 0.5}), 2)
    assert [game.sticky_action_prob for game in env._games] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("Catch", {"size": 8}, "^Catch: .*'size'; it takes 'rows', 'columns', got size=8$"),
        ("Dials", {"size": 8}, "^Dials: .*'size'; it takes nothing, got size=8$"),
        ("Memory", {"num_envs": 8}, "^Memory: .*'num_envs'; it takes 'episode_length', got num_e"),
        ("Mock", {"length": 8}, "^Mock: .*'length'; it takes 'episode_length', got length=8$"),
        (SIZED, {}, "Sized: missing .*'size'; it takes 'size', 'fill', got none$"),
        (SIZED, {"fill": 1}, "Sized: missing .*'size'; it takes 'size', 'fill', got fill=1$"),
        (SIZED, {"sise": 1}, "Sized: .*'si[sz]e'; it takes 'size', 'fill', got sise=1$"),
        (VECTOR, {"num_envs": 1}, "vector: .*'num_envs'; it takes 'episode_length', got num_envs"),
        (
            "CartPole-v1",
            {"size": 8},
            "^CartPole-v1: .*'size'; it takes .*, 'max_episode_steps', got size=8$",
        ),
    ],
)
def test_wrong_keyword_arguments_are_refused_with_the_accepted_ones(
    env_id: str, kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(envs.EnvError, match=sentence):
        envs.make(EnvSpec(env_id, kwargs), 2)


def test_atari_games_refuse_keyword_arguments_and_name_their_flags() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(envs.EnvError, match="takes no keyword arguments, got size: .*frame_skip"):
        envs.make(EnvSpec("PongNoFrameskip-v4", {"size": 8}), 1)


def test_minatar_refuses_keyword_arguments_with_the_accepted_ones() -> None:
    pytest.importorskip("minatar")
    with pytest.raises(envs.EnvError, match="^MinAtar/Breakout-v1: .*'size'.*sticky_action_prob"):
        envs.make(EnvSpec("MinAtar/Breakout-v1", {"size": 8}), 1)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "sentence"),
    [
        ("Catch", {"rows": 1}, "rows must be an integer of at least 2, got 1"),
        ("Catch", {"columns": "5"}, "columns must be an integer of at least 1, got '5'"),
        ("Memory", {"episode_length": 0}, "episode_length must be an integer of at least 2, got 0"),
        ("Mock", {"episode_length": 0}, "episode_length must be an integer of at least 1, got 0"),
    ],
)
def test_values_that_an_environment_rejects_are_refused(
    env_id: str, kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        envs.make(EnvSpec(env_id, kwargs), 1)
