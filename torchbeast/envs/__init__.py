# SPDX-License-Identifier: Apache-2.0
"""Concrete environments, found by name and imported only when you use them.

| env_id | is |
| --- | --- |
| `Mock` | constant cost and known content, in the shape of an Atari game (`toy.py`) |
| `Catch`, `Memory`, `Dials`, `BitFlip` | toy tasks that are learnt in seconds (`toy.py`) |
| `PongNoFrameskip-v4`, `Pong-v4`, `ALE/Pong-v5` | Atari games (`atari.py`, docs/how-to/atari.md) |
| `MinAtar/Breakout-v1` | a small Atari-like game (`minatar.py`) |
| `envpool:CartPole-v1` | a task of EnvPool (`registered.py`, docs/how-to/envpool.md) |
| `pettingzoo:mpe/simple_spread_v3` | several agents (docs/how-to/several-agents.md) |
| `package.module:factory` | your own: the factory is called once for each environment, or, |
| | when it has a parameter num_envs, once with it, and returns a VecEnv |
| anything else | a Gymnasium id, `package:MyEnv-v0` included (`registered.py`) |

An `EnvSpec` adds keyword arguments of the constructor to a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from torchbeast.core.base.specs import check_takes
from torchbeast.core.envs import vec_env
from torchbeast.core.envs.selection import leaf_keys
from torchbeast.core.envs.sync_vec_env import SyncVecEnv, accepts
from torchbeast.core.envs.tasks import TasksEnv
from torchbeast.envs.spec import BUILT_IN, EnvError, EnvOptions, EnvSpec, is_atari, need
from torchbeast.errors import UsageError, running_users_code

__all__ = [
    "EnvError",
    "EnvOptions",
    "EnvSpec",
    "make",
    "make_atari_test_env",
    "make_atari_train_env",
    "make_mujoco_test_env",
    "make_mujoco_train_env",
    "make_pybullet_test_env",
    "make_pybullet_train_env",
    "make_vec",
]


def make(
    env: EnvSpec | str, num_envs: int = 1, *, num_threads: int = 1, render: bool = False
) -> vec_env.VecEnv:
    """Makes environments that are stepped together.

    Args:
        env: The id of an environment, such as "CartPole-v1", "ALE/Pong-v5" or "my_module:make_env";
            or an EnvSpec, which adds keyword arguments and options.
        num_envs: Number of environments.
        num_threads: Threads that step them; only Atari games and EnvPool use more than one.
        render: Whether Gymnasium's environments can draw themselves, see SyncVecEnv.render.

    Raises:
        EnvError: If TorchBeast refuses the request. Exceptions of the environment's own code pass
            unchanged.

    Example:
        ```python
        env = make_env("CartPole-v1", num_envs=8)
        observation = env.reset(seed=1)
        step = env.step(np.zeros(8, np.int64))
        ```
    """
    spec = EnvSpec(env) if isinstance(env, str) else env
    keys = spec.options.observation_keys
    try:
        if len(tasks := spec.tasks) > 1:
            return _make_tasks(spec, tasks, num_envs, num_threads, render)
        if spec.options.selfplay:
            return _self_play(spec, num_envs)
        made = _make(spec, num_envs, num_threads, render)
        vec_env.check_gives_info(made, spec.options.info_keywords)
        kept_already = isinstance(made, SyncVecEnv) and made.observation_keys == keys
        return vec_env.SelectedVecEnv(made, keys) if keys and not kept_already else made
    except UsageError as error:
        raise EnvError(str(error)) from error.__cause__


def make_vec(
    env: EnvSpec | str | Callable[..., Any] | Sequence[EnvSpec | str | Callable[..., Any]],
    num_envs: int = 1,
    *,
    info_keywords: Sequence[str] = (),
    **kwargs: Any,
) -> vec_env.VecEnvFactory:
    """Describes environments for a Scheme, in one call of VecEnv.create_factory.

    It makes one environment to find the spaces, and closes it.

    Args:
        env: The id of an environment, such as "CartPole-v1"; an EnvSpec, which adds options; or a
            function that returns one environment with Gymnasium's interface; or a list of these,
            the tasks of one agent.
        num_envs: Number of environments of each worker, which are stepped together.
        info_keywords: Names of numbers to log, see VecEnv.create_factory.
        **kwargs: Arguments of gymnasium.make, or of the function.

    Returns:
        The `train_envs_factory` of a Scheme. Its attributes `observation_space` and `action_space`
        are what OnPolicyActorCritic.create_factory takes.

    Raises:
        EnvError: If there is no such environment, or it does not take the arguments.
        TypeError: For an environment in place of a function, or if the function does not take the
            arguments.
        ValueError: If num_envs is below 1.

    Example:
        ```python
        scheme = Scheme.preset("ppo", make_vec("CartPole-v1", 8))
        ```
    """
    if not (callable(env) or isinstance(env, (EnvSpec, Sequence))):
        raise TypeError(
            f"make_vec takes a name, or a function that makes an environment, got {env!r}: give a "
            "function, such as lambda: gymnasium.make(ID)"
        )
    if callable(env):
        env_fn, env_kwargs = env, kwargs
    else:
        if isinstance(env, str):
            spec = EnvSpec(env)
        else:
            spec = env if isinstance(env, EnvSpec) else EnvSpec.of_tasks(env)
        spec = dataclasses.replace(spec, kwargs={**spec.kwargs, **kwargs})
        if (count := len(spec.tasks)) > 1:
            make(spec.with_shares().dealt(0, count), count).close()  # which compares the tasks
        env_fn, env_kwargs = make, {"env": spec}
    return vec_env.VecEnv.create_factory(
        env_fn=env_fn, env_kwargs=env_kwargs, vec_env_size=num_envs, info_keywords=info_keywords
    )[0]


def _make_tasks(
    spec: EnvSpec, tasks: Sequence[EnvSpec], num_envs: int, num_threads: int, render: bool
) -> vec_env.VecEnv:
    """Makes environments of several tasks. MinAtar's have as many channels as the game that has
    most.
    """
    from torchbeast.envs.minatar import CHANNELS, PREFIX

    counts, parts = spec.dealt(0, num_envs).options.task_shares, {}
    with ExitStack() as ending:
        for number, (task, count) in enumerate(zip(tasks, counts, strict=True)):
            channels = {"channels": CHANNELS} if task.name.startswith(PREFIX) else {}
            task = dataclasses.replace(task, kwargs={**channels, **task.kwargs})
            if count:
                part = make(task, int(count), num_threads=num_threads, render=render)
                parts[number] = ending.enter_context(closing(part))
        made = TasksEnv(parts, spec.task_names, spec.options.task_input)
        made.spec = spec  # whose task_returns are the scale of an evaluation
        ending.pop_all()
    return made


def _make(spec: EnvSpec, num_envs: int, num_threads: int, render: bool) -> vec_env.VecEnv:
    name = spec.name
    if num_envs < 1:
        raise EnvError(f"{name}: at least one environment is needed, got num_envs={num_envs}")
    from torchbeast.envs import atari, minatar, registered, toy

    prefixes = minatar.PREFIX, registered.ENV_POOL, registered.PETTING_ZOO
    ours = name in BUILT_IN or name.startswith(prefixes) or is_atari(name)
    if ours and spec.options.mask_actions:
        raise EnvError(f"{name} has no action masks: remove mask_actions")
    if is_atari(name):
        return atari.make(spec, num_envs, num_threads)
    if name.startswith(registered.ENV_POOL):
        return registered.make_of_env_pool(spec, num_envs, num_threads)
    if of_atari := spec.options.of_atari():
        flags = " and ".join(of_atari)
        raise EnvError(f"{flags} needs an Atari game, and {name} is not one: remove {flags}")
    if name.startswith(registered.PETTING_ZOO):
        return registered.make_of_petting_zoo(spec, num_envs)
    if name in BUILT_IN:
        built_in: Callable[..., vec_env.VecEnv] = getattr(toy, name)
        check_takes(built_in, spec.kwargs, name, ours=("num_envs",))
        return built_in(num_envs, **spec.kwargs)
    if spec.is_factory:
        return _make_by_factory(spec, num_envs)
    if name.startswith(minatar.PREFIX):
        return minatar.make(spec, num_envs)
    return registered.make_of_gymnasium(spec, num_envs, render)


def _self_play(spec: EnvSpec, num_envs: int) -> vec_env.VecEnv:
    from torchbeast.core.actors.self_play import SelfPlay  # imports torch

    games, keys = _make(spec, 1, 1, False), spec.options.observation_keys
    if keys and {*keys} != {*leaf_keys(games.observation_space)}:  # a run records all of them
        raise EnvError("selfplay does not take observation_keys: remove them")
    return SelfPlay(games, num_envs, spec.options.selfplay or "")


def _make_by_factory(spec: EnvSpec, num_envs: int) -> vec_env.VecEnv:
    """Makes num_envs environments of the user's factory; raises UsageError."""
    factory = spec.load()
    ours = ("num_envs",) if accepts(factory, "num_envs") else ()
    check_takes(factory, spec.kwargs, spec.name, ours=ours)
    keys = spec.options.observation_keys
    if spec.options.mask_actions:
        if ours:
            raise EnvError(
                f"mask_actions reads masks from info, but {spec.name} returns a VecEnv, which has "
                "no info: add an action_mask to its observations, and remove mask_actions"
            )
        from torchbeast.envs.masks import masked_from_info

        factory = masked_from_info(factory)
    return vec_env.vec_env_of(factory, spec.kwargs, num_envs, spec.name, keys)


def make_environment(env: EnvSpec, num_envs: int, render: bool = False) -> vec_env.VecEnv:
    """Makes num_envs environments in a child process, with errors that a user can read.

    Raises UsageError for a wrong name or argument, and RunError when the environment's own code
    fails.
    """
    with running_users_code(f"{env.name} cannot be made"):
        return make(env, num_envs, render=render)


# --- Functions that make environments of one family, for VecEnv.create_factory:
#     VecEnv.create_factory(env_fn=make_atari_train_env, env_kwargs={"env_id": "ALE/Pong-v5"})
# Nothing differs between training and test but what a run does with them: rewards are never clipped
# in an environment, and evaluations count whole games. So the two functions of a family make the
# same environments.


def make_atari_train_env(num_envs: int, env_id: str, **options: Any) -> vec_env.VecEnv:
    """Makes Atari games.

    Args:
        num_envs: Number of environments.
        env_id: The id, such as ALE/Pong-v5.
        **options: Options of EnvOptions, such as frame_skip=4.

    Raises:
        EnvError: If there is no such environment, or a package is missing.
    """
    return make(_atari(env_id, **options), num_envs)


make_atari_test_env = make_atari_train_env


def make_mujoco_train_env(num_envs: int, env_id: str, **kwargs: Any) -> vec_env.VecEnv:
    """Makes MuJoCo environments.

    Args:
        num_envs: Number of environments.
        env_id: The id, such as HalfCheetah-v5.
        **kwargs: Further arguments of gymnasium.make.

    Raises:
        EnvError: If there is no such environment, or a package is missing.
    """
    return make(_mujoco(env_id, **kwargs), num_envs)


make_mujoco_test_env = make_mujoco_train_env


def make_pybullet_train_env(num_envs: int, env_id: str, **kwargs: Any) -> vec_env.VecEnv:
    """Makes PyBullet environments.

    The package pybullet-envs-gymnasium ports them to Gymnasium.

    Args:
        num_envs: Number of environments.
        env_id: The id, such as HalfCheetahBulletEnv-v0.
        **kwargs: Further arguments of gymnasium.make.

    Raises:
        EnvError: If there is no such environment, or a package is missing.
    """
    return make(_pybullet(env_id, **kwargs), num_envs)


make_pybullet_test_env = make_pybullet_train_env


def spec_of(
    env_fn: Callable[..., Any], env_kwargs: Mapping[str, Any], is_sent: bool = True
) -> EnvSpec:
    """Returns the spec of what a function makes with these arguments. For `make` and the functions
    of families it is the spec of the named environment, so that the programs can evaluate and
    resume the run.

    is_sent: whether other processes get it; else a lambda is only named, not pickled.
    """
    if env_fn in _SPECS:
        return _SPECS[env_fn](**env_kwargs)
    return EnvSpec.of(env_fn, env_kwargs) if is_sent else EnvSpec.naming(env_fn, env_kwargs)


def _atari(env_id: str, **options: Any) -> EnvSpec:
    if not is_atari(env_id):
        raise EnvError(f"{env_id} is not an Atari game: use an id such as ALE/Pong-v5")
    return EnvSpec(env_id, options=EnvOptions(**options))


def _mujoco(env_id: str, **kwargs: Any) -> EnvSpec:
    need("mujoco", env_id, "'torchbeast[mujoco]'")
    return EnvSpec(env_id, kwargs)


def _pybullet(env_id: str, **kwargs: Any) -> EnvSpec:
    need(_PYBULLET, env_id, "'torchbeast[pybullet]'")
    return EnvSpec(f"{_PYBULLET}:{env_id}", kwargs)


_PYBULLET = "pybullet_envs_gymnasium"
_SPECS: dict[Callable[..., Any], Callable[..., EnvSpec]] = {
    make: lambda env, **_: EnvSpec(env) if isinstance(env, str) else env,  # threads, rendering
    make_atari_train_env: _atari,
    make_mujoco_train_env: _mujoco,
    make_pybullet_train_env: _pybullet,
}
