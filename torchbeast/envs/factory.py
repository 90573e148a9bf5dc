# SPDX-License-Identifier: Apache-2.0
"""Users' own environments, named `package.module:factory`.

The factory is called once per environment, with the spec's keyword arguments, and returns one with
Gymnasium's or legacy Gym's interface. A factory with a parameter num_envs is called once, with
num_envs=E, and returns a VecEnv.
"""

from __future__ import annotations

from torchbeast.core.envs.vec_env import VecEnv, WrongNumber, accepts, vec_env_of
from torchbeast.core.specs import check_takes
from torchbeast.envs.errors import EnvError
from torchbeast.envs.spec import EnvSpec


def make(spec: EnvSpec, num_envs: int) -> VecEnv:
    """Makes num_envs environments of the user's factory; raises EnvError or SpecError."""
    factory = spec.load()
    ours = ("num_envs",) if accepts(factory, "num_envs") else ()
    check_takes(factory, spec.kwargs, spec.name, ours=ours)
    keys = spec.options.observation_keys
    try:
        return vec_env_of(factory, spec.kwargs, num_envs, spec.name, keys)
    except WrongNumber as error:
        raise EnvError(str(error)) from None
