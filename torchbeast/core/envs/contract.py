# SPDX-License-Identifier: Apache-2.0
"""Checks that what a user's function returned is an environment, and that it gives finite numbers,
so that a fault is found where it arises. E is the number of environments.

Other libraries' objects are recognised by the names of their attributes, so that none is imported.
`whose` is the name of the environment in messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchbeast.core.envs.spaces import (
    ActionLeaf,
    ArraySpec,
    ObservationSpace,
    leaf_paths,
    leaves_in,
)
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


class FiniteCheck:
    """Refuses NaN and infinity in the float leaves of observations.

    Each leaf of all environments is checked at once, which takes about 1 us where they are a few
    numbers. A number that is too large for the dtype of its leaf has become infinite.
    """

    def __init__(self, space: ObservationSpace) -> None:
        """space: of one environment's observations."""
        self._space = space
        leaves = enumerate(zip(flatten(space), leaf_paths(space, "observation"), strict=True))
        self._floats = [
            (index, path)
            for index, (spec, path) in leaves
            if spec.dtype.startswith("float") and math.prod(spec.shape)
        ]

    def __call__(
        self,
        rows: Sequence[np.ndarray],
        where: Callable[[int], str],
        given: Sequence[Any] | None = None,
    ) -> None:
        """Raises ValueError unless leaves [E, ...] are finite.

        where: names environment e and its step for the message. given: the observations that the
        environments returned, [E], if they are known; the message has their value.
        """
        for index, path in self._floats:
            finite = np.isfinite(rows[index])
            if not finite.item(finite.argmin()):  # half the time of finite.all()
                e, *entry = (int(i) for i in np.argwhere(~finite)[0])
                leaf = rows[index][e] if given is None else leaves_in(self._space, given[e])[index]
                raise ValueError(
                    f"{where(e)}: expected finite {rows[index].dtype} in the {path}, got "
                    f"{np.asarray(leaf)[tuple(entry)]}{f' at {entry}' if entry else ''}"
                )


def check_rewards(reward: np.ndarray, env_id: str) -> None:
    """Raises ValueError unless the rewards [E] are finite."""
    for index in np.flatnonzero(~np.isfinite(reward)):
        raise ValueError(
            f"environment {index} of {env_id}: expected a finite reward, got {reward[index]}"
        )
