# SPDX-License-Identifier: Apache-2.0
"""Environments registered with Gymnasium. The only module that imports gymnasium."""

from __future__ import annotations

import contextlib
import re
from importlib.util import find_spec
from typing import Any

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.specs import check_takes, import_module
from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv
from torchbeast.envs.masks import masked_from_info
from torchbeast.envs.spec import EnvError, EnvSpec

# Packages that Gymnasium does not import, by the prefixes of their ids.
_PACKAGES = {
    "BabyAI-": ("minigrid", "'torchbeast[minigrid]'"),
    "MiniGrid-": ("minigrid", "'torchbeast[minigrid]'"),
    "MiniHack-": ("minihack", "minihack"),
    "NetHack": ("nle", "'torchbeast[nethack]'"),
}


def make(spec: EnvSpec, num_envs: int, render: bool) -> VecEnv:
    """Makes num_envs environments of a Gymnasium id, with the time limit registered for it.

    spec: its kwargs go to gymnasium.make, which passes most of them to the constructor.
    render: whether they render RGB arrays, for which some need another package. Raises EnvError
    when there is no such id, or a package is missing.
    """
    env_id = spec.name
    gymnasium: Any = import_module("gymnasium", env_id)
    registered = _spec(gymnasium, env_id)
    _check_kwargs(gymnasium, registered, spec)
    mode = {"render_mode": "rgb_array"} if render else {}
    kwargs = {"disable_env_checker": True, **spec.kwargs, **mode}

    def make_one() -> Any:
        return gymnasium.make(registered, **kwargs)

    try:
        make_each = masked_from_info(make_one) if spec.options.mask_actions else make_one
        return SyncVecEnv([make_each] * num_envs, env_id, spec.options.observation_keys)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise EnvError(f"{env_id} needs a package that is not installed: {error}") from error


def _check_kwargs(gymnasium: Any, registered: Any, spec: EnvSpec) -> None:
    """Raises EnvError unless the environment's constructor or gymnasium.make takes them."""
    if not spec.kwargs:
        return
    constructor = registered.entry_point
    if isinstance(constructor, str):
        constructor = gymnasium.envs.registration.load_env_creator(constructor)
    given = {**registered.kwargs, **spec.kwargs}
    check_takes(constructor, given, spec.name, also=("max_episode_steps",))  # gymnasium.make's own


def _import_package_of(env_id: str) -> None:
    """Imports the package that registers such ids; raises EnvError when it is not installed."""
    for start, (package, to_install) in _PACKAGES.items():
        if env_id.startswith(start):
            if find_spec(package) is None:
                raise EnvError(f"{env_id} needs {package}: pip install {to_install}")
            import_module(package, env_id)


def _spec(gymnasium: Any, env_id: str) -> Any:
    """Returns Gymnasium's spec of an id; `module:Id-v0` imports the module first."""
    from torchbeast.envs import BUILT_IN

    module_name, _, name = env_id.rpartition(":")
    if module_name:
        import_module(module_name, env_id)
    elif name not in gymnasium.registry:
        _import_package_of(name)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        if factory := _factory_in(env_id):
            raise EnvError(
                f"unknown environment {env_id}; for a function of a module, give {factory}"
            ) from error
        if not isinstance(error, gymnasium.error.UnregisteredEnv):  # malformed, deprecated
            raise EnvError(f"{env_id}: {error}") from error
        hint = did_you_mean(env_id, [*gymnasium.registry, *BUILT_IN])
        where = "" if hint or module_name else "; give package:Id-v0 for another package"
        if re.search(r"_v\d+$", env_id):
            where = "; for an environment of PettingZoo, give pettingzoo:FAMILY/NAME"
        raise EnvError(f"unknown environment {env_id}{hint}{where}") from error


def _factory_in(env_id: str) -> str:
    """Returns "my_module:make_env" for "my_module.make_env" if there is such a module, else ""."""
    module, _, function = env_id.rpartition(".")
    with contextlib.suppress(ImportError, ValueError):
        if module and find_spec(module) is not None:
            return f"{module}:{function}"
    return ""
