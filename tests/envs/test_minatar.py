# SPDX-License-Identifier: Apache-2.0
"""MinAtar's games have their Gymnasium ids and play as through MinAtar's own interface."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from torchbeast import envs
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs import minatar, spec


def test_a_game_is_found_by_its_id() -> None:
    pytest.importorskip("minatar")
    env = envs.make("MinAtar/Breakout-v1", 2)
    assert env.observation_space == ArraySpec((10, 10, 4), "bool")
    assert env.action_space == Discrete(3)
    assert envs.make("MinAtar/SpaceInvaders-v0", 1).action_space == Discrete(6)


@pytest.mark.parametrize("game", ["breakout", "space_invaders"])
def test_a_game_plays_as_through_minatars_own_interface(game: str) -> None:
    gym = pytest.importorskip("minatar.gym")

    def own() -> object:
        return gym.BaseEnv(game, use_minimal_action_set=True)

    ours = minatar.MinAtarEnv(game, 2, minimal_actions=True, env_id=game)
    theirs: VecEnv = SyncVecEnv([own, own], game)
    actions = np.random.default_rng(0).integers(ours.action_space.n, size=(300, 2))
    assert np.array_equal(ours.reset(5), theirs.reset(5))
    episodes = 0
    for action in actions:
        step, expected = ours.step(action), theirs.step(action)
        for got, wanted in zip(step, expected, strict=True):
            assert np.array_equal(got, wanted)
        episodes += int(step.terminated.sum())
    assert episodes > 4


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("MinAtar/Breakuot-v1", "MinAtar has no game called Breakuot; did you mean Breakout"),
        ("MinAtar/Breakout-v7", "expected a MinAtar name such as MinAtar/Breakout-v1"),
    ],
)
def test_a_wrong_name_is_refused_in_one_sentence(env_id: str, sentence: str) -> None:
    with pytest.raises(envs.EnvError, match=sentence):
        envs.make(env_id, 1)


def test_loading_a_game_leaves_the_users_logging_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minatar")
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    envs.make("MinAtar/Breakout-v1", 1)
    assert logging.root.manager.disable == logging.INFO


def test_without_minatar_its_ids_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match=r"pip install 'torchbeast\[minatar\]'"):
        envs.make("MinAtar/Breakout-v1", 1)
