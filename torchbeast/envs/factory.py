# SPDX-License-Identifier: Apache-2.0
"""Users' own environments, named `package.module:factory`.

The factory is called once per environment, with the spec's keyword arguments, and returns one with
Gymnasium's or legacy Gym's interface. A factory with a parameter num_envs is called once, with
num_envs=E, and returns a VecEnv.
"""

from __future__ import annotations

import functools

from torchbeast.core.envs.vec_env import SyncVecEnv, VecEnv, accepts
from torchbeast.core.specs import check_takes
from torchbeast.envs.errors import EnvError
from torchbeast.envs.spec import EnvSpec


def make(spec: EnvSpec, num_envs: int) -> VecEnv:
    """Makes num_envs environments of the user's factory; raises EnvError or SpecError."""
    factory = spec.load()
    if not accepts(factory, "num_envs"):
        check_takes(factory, spec.kwargs, spec.name)
        make_one = functools.partial(factory, **spec.kwargs)
        return SyncVecEnv([make_one] * num_envs, spec.name, spec.options.observation_keys)
    check_takes(factory, spec.kwargs, spec.name, ours=("num_envs",))
    env: VecEnv = factory(num_envs=num_envs, **spec.kwargs)
    if getattr(env, "num_envs", None) != num_envs:
        raise EnvError(
            f"{spec.name}: called with num_envs={num_envs}, the factory must return a VecEnv with "
            f"as many environments, got {env!r} with num_envs={getattr(env, 'num_envs', None)}"
        )
    return env
