# SPDX-License-Identifier: Apache-2.0
"""Makes environments in the program's own process, with errors that a user can read."""

from __future__ import annotations

import traceback

from torchbeast import envs
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.options import DEFAULTS, EnvOptions
from torchbeast.errors import RunError, UsageError, without_our_frames


def make_environment(
    env_id: str, num_envs: int, options: EnvOptions = DEFAULTS, render: bool = False
) -> VecEnv:
    """Makes `num_envs` environments.

    Raises UsageError for a wrong name or option, and RunError when the environment's own code
    fails.
    """
    try:
        return envs.make(env_id, num_envs, render=render, options=options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        raise RunError(f"{env_id} cannot be made: {what_it_raised(error)}") from error


def what_it_raised(error: Exception) -> str:
    """Returns the error as text, with only the user's code in its traceback."""
    return without_our_frames("".join(traceback.format_exception(error))).strip()
