# SPDX-License-Identifier: Apache-2.0
"""Concrete environments, found by name and imported only when they are asked for.

| env_id | is |
| --- | --- |
| `Mock` | constant cost and known content, in the shape of an Atari game (`mock.py`) |
| `Catch`, `Memory`, `Dials` | toy tasks that are learnt in seconds (`toy.py`) |
| `PongNoFrameskip-v4`, `Pong-v4`, `ALE/Pong-v5` | Atari games (`atari.py`, docs/atari.md) |
| `MinAtar/Breakout-v1` | a small Atari-like game (`minatar.py`) |
| `package.module:factory` | your own: the factory is called once for each environment, or, |
| | when it has a parameter num_envs, once with it, and returns a VecEnv (`factory.py`) |
| anything else | a Gymnasium id, `package:MyEnv-v0` included (`gym.py`) |
"""

from __future__ import annotations

import re

from torchbeast.core.envs.selection import SelectedVecEnv
from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv
from torchbeast.envs.errors import EnvError
from torchbeast.envs.options import DEFAULTS, EnvOptions

__all__ = ["EnvError", "EnvOptions", "make"]

BUILT_IN = ("Catch", "Dials", "Memory", "Mock")


def make(
    env_id: str,
    num_envs: int,
    *,
    num_threads: int = 1,
    render: bool = False,
    options: EnvOptions = DEFAULTS,
) -> VecEnv:
    """num_envs environments of that name, stepped together.

    num_threads: threads that step them; only Atari games use more than one.
    render: Gymnasium's can draw themselves (SyncVecEnv.render).
    options: what a run decides for all of its environments.
    An EnvError says in one sentence why the environment cannot be made.
    """
    env = _make(env_id, num_envs, num_threads, render, options)
    keys = options.observation_keys
    kept_already = isinstance(env, SyncVecEnv) and env.observation_keys == keys
    return SelectedVecEnv(env, keys) if keys and not kept_already else env


def _make(
    env_id: str, num_envs: int, num_threads: int, render: bool, options: EnvOptions
) -> VecEnv:
    if num_envs < 1:
        raise EnvError(f"{env_id}: at least one environment is needed, got num_envs={num_envs}")
    from torchbeast.envs import atari

    if atari.is_atari(env_id):
        return atari.make(env_id, num_envs, num_threads, options)
    if of_atari := options.of_atari():
        flags = " and ".join(f"--{name}" for name in of_atari)
        raise EnvError(f"{env_id} is no game of Atari, and has no {flags}: leave out {flags}")
    if env_id in BUILT_IN:
        return _make_built_in(env_id, num_envs)
    if ":" in env_id and not re.search(r"-v\d+$", env_id):
        from torchbeast.envs import factory

        return factory.make(env_id, num_envs, options)
    from torchbeast.envs import minatar

    if env_id.startswith(minatar.PREFIX):
        return minatar.make(env_id, num_envs)
    from torchbeast.envs import gym

    return gym.make(env_id, num_envs, render, options)


def _make_built_in(env_id: str, num_envs: int) -> VecEnv:
    if env_id == "Mock":
        from torchbeast.envs.mock import Mock

        return Mock(num_envs)
    from torchbeast.envs import toy

    made: VecEnv = getattr(toy, env_id)(num_envs)
    return made
