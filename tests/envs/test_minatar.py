# SPDX-License-Identifier: Apache-2.0
"""MinAtar's games go by their Gymnasium ids, without a word about where they come from."""

from __future__ import annotations

import warnings

import pytest

from torchbeast import envs
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.envs import minatar


def test_a_game_is_found_by_its_id() -> None:
    pytest.importorskip("minatar")
    env = envs.make("MinAtar/Breakout-v1", 2)
    assert env.observation_space == ArraySpec((10, 10, 4), "bool")
    assert env.action_space == Discrete(3)


def test_the_games_are_registered_once_in_a_process_also_after_a_wrong_id() -> None:
    pytest.importorskip("minatar")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.make("MinAtar/Breakout-v1", 1)
        envs.make("MinAtar/SpaceInvaders-v0", 1)
        with pytest.raises(envs.EnvError, match="did you mean MinAtar/Breakout-v1"):
            envs.make("MinAtar/Breakuot-v1", 1)


def test_without_minatar_its_ids_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minatar, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match=r"pip install 'torchbeast\[minatar\]'"):
        envs.make("MinAtar/Breakout-v1", 1)
