# SPDX-License-Identifier: Apache-2.0
"""MinAtar: five Atari games on boards of 10x10 (Young and Tian 2019, arXiv:1903.03176).

An observation is bool [10, 10, channels], one channel for each kind of object. v1 has the actions
that do something in the game, v0 all six; with a probability of 0.1 the last action is repeated.
"""

from __future__ import annotations

from importlib.util import find_spec

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs import gym
from torchbeast.envs.errors import EnvError

PREFIX = "MinAtar/"


def make(env_id: str, num_envs: int) -> VecEnv:
    """num_envs games of an id like MinAtar/Breakout-v1."""
    if find_spec("minatar") is None:
        raise EnvError(
            f"{env_id} needs MinAtar, which is not installed: pip install 'torchbeast[minatar]'"
        )
    _register()
    return gym.make(env_id, num_envs)


def _register() -> None:
    """Tells Gymnasium the games, which MinAtar leaves to its users; twice would be a warning."""
    if not gym.is_registered(f"{PREFIX}Breakout-v1"):
        from minatar.gym import register_envs

        register_envs()
