# SPDX-License-Identifier: Apache-2.0
"""Checks that what a user's function returned is an environment.

Other libraries' objects are recognised by the names of their attributes, so that none is imported.
`whose` is the name of the environment in messages.
"""

from __future__ import annotations

from typing import Any

from torchbeast.core.envs.spaces import ActionLeaf, ArraySpec
from torchbeast.core.nest_py import flatten
from torchbeast.errors import UsageError

_OF_VEC_ENV = (
    "env_id",
    "observation_space",
    "action_space",
    "frame_stack",
    "reset",
    "step",
    "close",
)


def check_environment(env: Any, whose: str) -> None:
    """Raises UsageError unless this is one environment with the interface of (old) Gym."""
    _refuse_other_things(env, whose)
    if is_gym_vector(env) or (hasattr(env, "num_envs") and hasattr(env, "frame_stack")):
        raise UsageError(
            f"{whose} is a vector environment itself: let the function that makes it have a "
            "parameter num_envs, as gymnasium.make_vec does"
        )
    _check_has(env, ("reset", "step"), whose, "an environment of Gymnasium's interface")
    if getattr(env, "action_space", None) is None:
        raise UsageError(
            f"{whose} has no action_space; give it one, for example gymnasium.spaces.Discrete(4)"
        )


def check_vec_env(env: Any, num_envs: int, whose: str) -> None:
    """Raises UsageError unless this is a VecEnv, or a vector environment of Gymnasium, with this
    number of environments.
    """
    _refuse_other_things(env, whose)
    if getattr(env, "num_envs", None) != num_envs:
        raise UsageError(
            f"{whose}: called with num_envs={num_envs}, the factory must return a VecEnv with "
            f"as many environments, got {env!r} with num_envs={getattr(env, 'num_envs', None)}; "
            "a function without the parameter num_envs returns one environment"
        )
    if is_gym_vector(env):
        return
    _check_has(env, _OF_VEC_ENV, whose, "a VecEnv")
    for name, kinds, converter in (
        ("observation_space", ArraySpec, "observation_spec"),
        ("action_space", ActionLeaf, "from_gymnasium"),
    ):
        for leaf in flatten(getattr(env, name)):
            if not isinstance(leaf, kinds):
                raise UsageError(
                    f"{whose}: the {name} of a VecEnv is made of torchbeast's spaces, got "
                    f"{leaf!r}: convert it by torchbeast.core.envs.spaces.{converter}"
                )


def is_gym_vector(env: Any) -> bool:
    """Returns whether this is a vector environment of Gymnasium's interface."""
    return hasattr(env, "single_action_space") and hasattr(env, "single_observation_space")


def _refuse_other_things(env: Any, whose: str) -> None:
    if env is None:
        raise UsageError(
            f"{whose}: expected an environment, got None: does its function return it?"
        )
    if isinstance(env, type):
        raise UsageError(
            f"{whose}: expected an environment, got the class {env.__name__}: return an instance "
            f"of it, {env.__name__}(...)"
        )
    if callable(getattr(env, "action_space", None)):  # a space for each agent
        kind = "AEC" if hasattr(env, "agent_iter") else "parallel"
        raise UsageError(
            f"{whose}: expected an environment of one agent, got {_named(env)} with an "
            f"action_space(agent), like PettingZoo's {kind} environments: wrap it so that reset "
            "and step serve one agent"
        )
    if hasattr(env, "step_async") and hasattr(env, "step_wait") and not is_gym_vector(env):
        raise UsageError(
            f"{whose}: expected an environment, got {_named(env)}, a vector environment of "
            "Stable-Baselines3: return a single environment from a function without the parameter "
            "num_envs, and TorchBeast steps several together"
        )


def _check_has(env: Any, names: tuple[str, ...], whose: str, expected: str) -> None:
    if missing := [name for name in names if not hasattr(env, name)]:
        raise UsageError(
            f"{whose}: expected {expected}, got {_named(env)} without {', '.join(missing)}"
        )


def _named(env: Any) -> str:
    kind = type(env)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
