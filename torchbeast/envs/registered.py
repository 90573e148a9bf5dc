# SPDX-License-Identifier: Apache-2.0
"""Environments that other packages make by an id: Gymnasium's, EnvPool's and PettingZoo's.

    CartPole-v1                        Gymnasium, the only place where it is imported
    envpool:CartPole-v1                EnvPool steps its tasks together in C++ (Weng et al. 2022,
                                       arXiv:2206.10558); docs/how-to/envpool.md
    pettingzoo:mpe/simple_spread_v3    PettingZoo has several agents (Terry et al. 2021,
                                       arXiv:2009.14471); docs/how-to/several-agents.md

`core/envs/gym_vector.py` adapts a pool, and `core/envs/agents.py` turns agents into environments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.specs import check_takes, import_module, values_in
from torchbeast.core.envs.gym_vector import EnvPoolEnv
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv, vec_env_of
from torchbeast.envs.masks import masked_from_info
from torchbeast.envs.spec import BUILT_IN, EnvError, EnvSpec, need
from torchbeast.errors import UsageError

ENV_POOL, PETTING_ZOO = "envpool:", "pettingzoo:"

# Packages that Gymnasium does not import, by the prefixes of their ids.
_PACKAGES = {
    "BabyAI-": ("minigrid", "'torchbeast[minigrid]'"),
    "MiniGrid-": ("minigrid", "'torchbeast[minigrid]'"),
    "MiniHack-": ("minihack", "minihack"),
    "NetHack": ("nle", "'torchbeast[nethack]'"),
}


def make_of_gymnasium(spec: EnvSpec, num_envs: int, render: bool) -> VecEnv:
    """Makes num_envs environments of a Gymnasium id, with the time limit registered for it.

    spec: its kwargs go to gymnasium.make, which passes most of them to the constructor.
    render: whether they render RGB arrays, for which some need another package. Raises EnvError
    when there is no such id, or a package is missing.
    """
    env_id = spec.name
    gymnasium: Any = import_module("gymnasium", env_id)
    registered = _spec(gymnasium, env_id)
    constructor = registered.entry_point
    if isinstance(constructor, str) and (spec.kwargs or render):
        constructor = gymnasium.envs.registration.load_env_creator(constructor)
    if spec.kwargs:  # of the environment's constructor, or of gymnasium.make
        given = {**registered.kwargs, **spec.kwargs}
        check_takes(constructor, given, env_id, also=("max_episode_steps",))
    metadata = getattr(constructor, "metadata", None)
    # A function or a wrapper does not say what it draws.
    draws = not isinstance(metadata, Mapping) or "rgb_array" in (metadata.get("render_modes") or ())
    mode = {"render_mode": "rgb_array"} if render and draws else {}
    kwargs = {"disable_env_checker": True, **spec.kwargs, **mode}

    def make_one() -> Any:
        return gymnasium.make(registered, **kwargs)

    try:
        make_each = masked_from_info(make_one) if spec.options.mask_actions else make_one
        return SyncVecEnv([make_each] * num_envs, env_id, spec.options.observation_keys)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        package = re.match(r"gymnasium\.envs\.(\w+)", str(registered.entry_point))
        what = f"pip install 'gymnasium[{package[1]}]'" if package else error
        raise EnvError(f"{env_id} needs a package that is not installed: {what}") from error


def _spec(gymnasium: Any, env_id: str) -> Any:
    """Returns Gymnasium's spec of an id; `module:Id-v0` imports the module first."""
    module_name, _, name = env_id.rpartition(":")
    if module_name:
        if to_install := dict(_PACKAGES.values()).get(module_name):
            need(module_name, env_id, to_install)
        import_module(module_name, env_id)
    elif name not in gymnasium.registry:
        for start, (package, to_install) in _PACKAGES.items():
            if name.startswith(start):
                need(package, name, to_install)
                import_module(package, name)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        versions = [known for known in gymnasium.registry if known.rpartition("-v")[0] == name]
        if versions:
            latest = max(versions, key=lambda known: int(known.rpartition("-v")[2]))
            raise EnvError(f"{env_id} has no version: use {latest}") from error
        if not isinstance(error, gymnasium.error.UnregisteredEnv):  # malformed, deprecated
            raise EnvError(f"{env_id}: {error}") from error
        hint = did_you_mean(env_id, [*gymnasium.registry, *BUILT_IN])
        where = f". For another package use package:{env_id}, for a function my_module:make_env"
        where = "" if hint or module_name else where
        if re.search(r"_v\d+$", env_id):
            where = ". For an environment of PettingZoo, use pettingzoo:FAMILY/NAME"
        raise EnvError(f"unknown environment {env_id}{hint}{where}") from error


def make_of_env_pool(spec: EnvSpec, num_envs: int, num_threads: int) -> EnvPoolEnv:
    """Makes num_envs environments of an id like envpool:Pong-v5.

    spec: its kwargs are options of the task, num_threads included. Raises EnvError if EnvPool does
    not have the task, or cannot make it with these options.
    """
    env_id, task = spec.name, spec.name.removeprefix(ENV_POOL)
    if of_atari := spec.options.of_atari():
        raise EnvError(
            f"{env_id} does not take {' and '.join(of_atari)}: configure it by EnvPool's own "
            "env_kwargs, such as repeat_action_probability and frame_skip"
        )
    need("envpool", env_id, "'torchbeast[envpool]'")
    envpool: Any = import_module("envpool", env_id)
    tasks = envpool.list_all_envs()
    if task not in tasks and (short := task.rpartition("/")[2]) in tasks:
        task = short  # procgen/CoinrunEasy-v0
    if task not in tasks:
        hint = did_you_mean(task, tasks)
        raise EnvError(f"{env_id}: EnvPool has no task {task}{hint}")
    try:
        from_pixels = bool(spec.kwargs.get("from_pixels"))  # which has other options
        config = envpool.make_spec(task, from_pixels=from_pixels).config._asdict()
        kwargs = {"num_threads": num_threads, **spec.kwargs}
        # Frames are sent one by one, and the learner's process stacks them.
        frame_stack = kwargs.get("stack_num", config.get("stack_num", 1))
        single = {"stack_num": 1} if "stack_num" in config else {}
        pool = envpool.make(task, env_type="gymnasium", num_envs=num_envs, **{**kwargs, **single})
        return EnvPoolEnv(pool, env_id, frame_stack)
    except UsageError:
        raise
    except Exception as error:  # unknown or wrong options, and missing libraries
        reason = str(error).partition("\n")[0]
        raise EnvError(
            f"{env_id}: EnvPool cannot make it with the options {values_in(spec.kwargs)}: "
            f"{type(error).__name__}: {reason}"
        ) from error


_MOVED = {"mpe": "mpe2"}  # families that have left PettingZoo


def make_of_petting_zoo(spec: EnvSpec, num_envs: int) -> VecEnv:
    """Makes games for num_envs agents of an id like pettingzoo:mpe/simple_spread_v3.

    spec: its kwargs are arguments of the environment. Raises EnvError if it does not exist.
    """
    module = _module(spec.name)
    made: Any = getattr(module, "parallel_env", None) or module.env
    check_takes(made, spec.kwargs, spec.name)
    return vec_env_of(made, spec.kwargs, num_envs, spec.name)


def _module(env_id: str) -> Any:
    """Imports the module of an environment of PettingZoo."""
    family, slash, name = env_id.removeprefix(PETTING_ZOO).partition("/")
    if not slash:
        raise EnvError(
            f"{env_id} is incomplete: add the family, as in {PETTING_ZOO}mpe/simple_spread_v3"
        )
    package = _MOVED.get(family, f"pettingzoo.{family}")
    root = package.partition(".")[0]
    need(root, env_id, "'torchbeast[pettingzoo]'")
    if find_spec(package) is None:
        families = [*_MOVED, *_names(root)]
        raise EnvError(f"{env_id}: PettingZoo has no {family}{did_you_mean(family, families)}")
    known = [each for each in _names(package) if each.rpartition("_v")[2].isdigit()]
    if name not in known:
        hint = did_you_mean(name, known)
        raise EnvError(f"{env_id}: {family} has no {name}{hint or ': it has ' + ', '.join(known)}")
    return import_module(f"{package}.{name}", env_id)


def _names(package: str) -> list[str]:
    """Returns the names of a package's modules."""
    found = find_spec(package)
    assert found is not None
    return [each.name for each in iter_modules(found.submodule_search_locations)]
