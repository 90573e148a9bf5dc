# SPDX-License-Identifier: Apache-2.0
"""Users' own environments, named `package.module:factory`.

The factory is called once per environment and returns one with Gymnasium's or legacy Gym's
interface. A factory with a parameter num_envs is called once, with num_envs=E, and returns a
VecEnv.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv, accepts
from torchbeast.envs.errors import EnvError, did_you_mean
from torchbeast.envs.options import EnvOptions


def make(env_id: str, num_envs: int, options: EnvOptions) -> VecEnv:
    factory = find(env_id)
    if not accepts(factory, "num_envs"):
        return SyncVecEnv([factory] * num_envs, env_id, options.observation_keys)
    env: VecEnv = factory(num_envs=num_envs)
    if getattr(env, "num_envs", None) != num_envs:
        raise EnvError(
            f"{env_id}: called with num_envs={num_envs}, the factory must return a VecEnv with as "
            f"many environments, got {env!r} with num_envs={getattr(env, 'num_envs', None)}"
        )
    return env


def find(env_id: str) -> Callable[..., Any]:
    """Returns the factory that `package.module:factory` names; raises EnvError if there is none."""
    module_name, _, factory_name = env_id.partition(":")
    module = import_module(module_name, env_id)
    factory = getattr(module, factory_name, None)
    if factory is None:
        hint = did_you_mean(factory_name, dir(module))
        raise EnvError(f"{env_id}: the module {module_name} has no {factory_name!r}{hint}")
    if not callable(factory):
        raise EnvError(f"{env_id}: {factory_name} is {factory!r}, expected a function or class")
    found: Callable[..., Any] = factory
    return found


def import_module(name: str, env_id: str) -> ModuleType:
    """Imports the module `name`; raises EnvError, which names `env_id`, when that fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise EnvError(
            f"{env_id}: there is no module {error.name}; install it, or start the program in its "
            "folder"
        ) from error
    except (TypeError, ValueError) as error:  # an empty or relative name
        raise EnvError(f"{env_id}: {name!r} is not the name of a module") from error
