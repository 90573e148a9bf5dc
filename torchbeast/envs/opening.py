# SPDX-License-Identifier: Apache-2.0
"""Makes environments in this process, with errors that a user can read."""

from __future__ import annotations

from torchbeast import envs
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, what_it_raised


def make_environment(env: EnvSpec | str, num_envs: int, render: bool = False) -> VecEnv:
    """Makes `num_envs` environments.

    Raises UsageError for a wrong name or argument, and RunError when the environment's own code
    fails.
    """
    try:
        return envs.make(env, num_envs, render=render)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        name = env if isinstance(env, str) else env.name
        raise RunError(f"{name} cannot be made: {what_it_raised(error)}") from error
