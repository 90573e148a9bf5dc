# SPDX-License-Identifier: Apache-2.0
"""Users' own environments, named `package.module:factory`.

The factory is called once per environment, with the spec's keyword arguments, and returns one with
Gymnasium's or legacy Gym's interface. A factory with a parameter num_envs is called once, with
num_envs=E, and returns a VecEnv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchbeast.core.envs.vec_env import VecEnv, accepts, vec_env_of
from torchbeast.core.specs import check_takes
from torchbeast.envs.masks import masked_from_info
from torchbeast.envs.spec import EnvError, EnvSpec


def make(spec: EnvSpec, num_envs: int) -> VecEnv:
    """Makes num_envs environments of the user's factory; raises UsageError."""
    factory = spec.load()
    ours = ("num_envs",) if accepts(factory, "num_envs") else ()
    check_takes(factory, spec.kwargs, spec.name, ours=ours)
    keys = spec.options.observation_keys
    if spec.options.mask_actions:
        factory = _masked(factory, spec.name, returns_one=not ours)
    return vec_env_of(factory, spec.kwargs, num_envs, spec.name, keys)


def _masked(factory: Callable[..., Any], name: str, returns_one: bool) -> Callable[..., Any]:
    if not returns_one:
        raise EnvError(
            f"{name} returns a VecEnv, which has no info for --mask_actions: put an action_mask "
            "into its observations, and leave out the flag"
        )
    return masked_from_info(factory)
