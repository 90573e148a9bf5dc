# SPDX-License-Identifier: Apache-2.0
"""Any environment that is registered with Gymnasium. The only module that imports gymnasium."""

from __future__ import annotations

from typing import Any

from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv
from torchbeast.envs.errors import EnvError, did_you_mean
from torchbeast.envs.factory import import_module


def make(env_id: str, num_envs: int, render: bool = False) -> VecEnv:
    """num_envs environments of a Gymnasium id, with the time limit that is registered with it.

    render: they can draw themselves, which some need another package for.
    """
    gymnasium = _gymnasium(env_id)
    spec = _spec(gymnasium, env_id)
    options = {"render_mode": "rgb_array"} if render else {}
    try:
        return SyncVecEnv(
            [lambda: gymnasium.make(spec, disable_env_checker=True, **options)] * num_envs, env_id
        )
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise EnvError(f"{env_id} needs a package that is not installed: {error}") from error


def _gymnasium(env_id: str) -> Any:
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise EnvError(
            f"{env_id} is looked for in Gymnasium, which is not installed: pip install gymnasium"
        ) from error
    return gymnasium


def _spec(gymnasium: Any, env_id: str) -> Any:
    """What Gymnasium knows of the id, which may name a module to import first: module:Id-v0."""
    from torchbeast.envs import BUILT_IN

    module_name, _, name = env_id.rpartition(":")
    if module_name:
        import_module(module_name, env_id)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        hint = did_you_mean(env_id, [*gymnasium.registry, *BUILT_IN])
        raise EnvError(f"no environment is called {env_id}{hint}") from error
    except gymnasium.error.Error as error:  # malformed, deprecated
        raise EnvError(f"{env_id}: {error}") from error
