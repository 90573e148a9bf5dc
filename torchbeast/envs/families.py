# SPDX-License-Identifier: Apache-2.0
"""Functions that make environments of one family, for VecEnv.create_factory.

    VecEnv.create_factory(env_fn=make_atari_train_env, env_kwargs={"env_id": "ALE/Pong-v5"})

Nothing differs between training and test but what a run does with them: rewards are never clipped
in an environment, and evaluations count whole games. So the two functions of a family make the same
environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs import make
from torchbeast.envs.atari import is_atari
from torchbeast.envs.spec import EnvError, EnvOptions, EnvSpec, need


def make_atari_train_env(num_envs: int, env_id: str, **options: Any) -> VecEnv:
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


def make_mujoco_train_env(num_envs: int, env_id: str, **kwargs: Any) -> VecEnv:
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


def make_pybullet_train_env(num_envs: int, env_id: str, **kwargs: Any) -> VecEnv:
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
    """Returns the spec of what a function makes with these arguments. For the functions here and
    `envs.make` it is the spec of the named environment, so that the programs can evaluate and
    resume the run.

    is_sent: whether other processes get it; else a lambda is only named, not pickled.
    """
    if env_fn in _SPECS:
        return _SPECS[env_fn](**env_kwargs)
    return EnvSpec.of(env_fn, env_kwargs) if is_sent else EnvSpec.naming(env_fn, env_kwargs)


def _atari(env_id: str, **options: Any) -> EnvSpec:
    if not is_atari(env_id):
        raise EnvError(f"{env_id} is not an Atari game: give an id such as ALE/Pong-v5")
    return EnvSpec(env_id, options=EnvOptions(**options))


def _mujoco(env_id: str, **kwargs: Any) -> EnvSpec:
    need("mujoco", env_id, "'torchbeast[mujoco]'")
    return EnvSpec(env_id, kwargs)


def _pybullet(env_id: str, **kwargs: Any) -> EnvSpec:
    need(_PYBULLET, env_id, "'torchbeast[pybullet]'")
    return EnvSpec(f"{_PYBULLET}:{env_id}", kwargs)


_PYBULLET = "pybullet_envs_gymnasium"
_SPECS: dict[Callable[..., Any], Callable[..., EnvSpec]] = {
    make: lambda env: EnvSpec(env) if isinstance(env, str) else env,
    make_atari_train_env: _atari,
    make_mujoco_train_env: _mujoco,
    make_pybullet_train_env: _pybullet,
}
