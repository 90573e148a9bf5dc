# SPDX-License-Identifier: Apache-2.0
"""What TorchBeast expects of an environment: its interface, finite numbers, numbers in its info.

A fault is found where it arises. Other libraries' objects are recognised by the names of their
attributes, so that none is imported. `whose` is the name of the environment in messages. E is the
number of environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.spaces import ActionLeaf, ArrayNest, ArraySpec, ObservationSpace, places
from torchbeast.errors import UsageError

MASK = "action_mask"
"""The entry of a dict observation that masks actions; see ActionMask in core/actors/contract.py."""


class VecStep(NamedTuple):
    """The results of one step of E environments.

    Attributes:
        observation: Leaves [E, ...]; where an episode ended, the first of the next one.
        reward: float32 [E], for the action just executed.
        terminated: bool [E], an end for learning; a lost life too, if so configured.
        truncated: bool [E], cut by a time limit; never true together with terminated.
        episode_end: bool [E], the whole game is over: counters and returns restart.
        final_observation: Leaves [K, ...] of the K truncated episodes, in index order; None if K is
            0.
        resets: bool [E], the environments that only began an episode and ignored their action, one
            step after `observation` was the last of the episode before. Their reward is 0 and
            terminated is true, as in an environment's first row; nothing learns from such a row or
            counts it. None: no environment.
    """

    observation: ArrayNest
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    episode_end: np.ndarray
    final_observation: ArrayNest | None
    resets: np.ndarray | None = None

    @staticmethod
    def of_games(observation: ArrayNest, reward: np.ndarray, ended: np.ndarray) -> VecStep:
        """Returns the results of games without lives or time limits.

        Args:
            observation: Leaves [E, ...].
            reward: float32 [E].
            ended: bool [E], the games that ended.
        """
        return VecStep(observation, reward, ended, np.zeros_like(ended), ended.copy(), None)


class OwnVecEnv:
    """Base class of TorchBeast's own vector environments; see VecEnv for the attributes."""

    num_envs: int
    env_id: str
    frame_stack = 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_envs} of {self.env_id}>"

    def close(self) -> None:
        """Does nothing: there are no resources to free."""


def check_environment(env: Any, whose: str) -> None:
    """Raises UsageError unless this is one environment with the interface of (old) Gym."""
    _check_pool(env, whose)
    if is_vector(env) or (hasattr(env, "num_envs") and hasattr(env, "frame_stack")):
        kind = "is a vector environment itself" if pool_in(env) is None else "has a pool of EnvPool"
        raise UsageError(
            f"{whose} {kind}: add a parameter num_envs to its factory, like gymnasium.make_vec"
        )
    needed = ("reset", "step", "action_space")
    if missing := [name for name in needed if getattr(env, name, None) is None]:
        raise UsageError(
            f"{whose}: expected an environment with Gymnasium's interface, got {_named(env)} "
            f"without {', '.join(missing)}"
        )


def check_vec_env(env: Any, num_envs: int, whose: str) -> None:
    """Raises UsageError unless this is a VecEnv, or a vector environment of Gymnasium or
    Stable-Baselines3, with this number of environments.
    """
    _check_pool(env, whose)
    if (count := attribute_of(env, "num_envs")) != num_envs:
        raise UsageError(
            f"{whose}: called with num_envs={num_envs}, the factory must return a VecEnv with "
            f"as many environments, got {_named(env)} with num_envs={count}; "
            "a function without the parameter num_envs returns one environment"
        )
    if is_vector(env):
        return
    for space in flatten((env.observation_space, env.action_space)):
        if not isinstance(space, ArraySpec | ActionLeaf):
            raise UsageError(
                f"{whose}: a VecEnv needs torchbeast's spaces, got {space!r}: convert it by "
                "observation_spec or from_gymnasium of torchbeast.core.envs.spaces"
            )


def innermost(env: Any) -> Any:
    """Returns the environment inside all wrappers that say what they wrap."""
    return getattr(env, "unwrapped", env)


def attribute_of(env: Any, name: str) -> Any:
    """Returns an attribute of an environment, or the innermost environment's if the wrapper lacks
    it, as Gymnasium's wrappers of single environments do; None if both lack it.
    """
    return getattr(env, name, getattr(innermost(env), name, None))


def is_gym_vector(env: Any) -> bool:
    """Returns whether this is a vector environment of Gymnasium's interface, maybe in a wrapper for
    single ones, as Isaac Lab's is; another such wrapper may show one of its environments.
    """
    if hasattr(env, "single_action_space") and hasattr(env, "single_observation_space"):
        return True
    base = innermost(env)
    is_vector = hasattr(base, "single_action_space") and hasattr(base, "single_observation_space")
    space = getattr(env, "observation_space", None)
    return is_vector and space != base.single_observation_space


def layers(env: Any) -> list[Any]:
    """Returns an environment and the ones that it wraps, whatever the names of the attributes that
    hold them, outermost first. A VecEnv is a layer of its own: it knows what it wraps.
    """
    envs = [env]
    for layer in envs:  # which grows
        if not hasattr(layer, "frame_stack"):
            parts = getattr(layer, "__dict__", {}).values()
            envs += [
                part
                for part in parts
                if hasattr(type(part), "step")
                and hasattr(type(part), "reset")
                and all(part is not other for other in envs)
            ]
    return envs


def pool_in(env: Any) -> Any:
    """Returns the pool of EnvPool, of any interface, that this is or wraps, or None."""
    for layer in layers(env):
        if any(cls.__name__ == "EnvPoolMixin" for cls in type(layer).__mro__):
            return layer
    return None


def is_vector(env: Any) -> bool:
    """Returns whether this is a vector environment of Gymnasium or Stable-Baselines3."""
    is_of_baselines = hasattr(env, "step_async") and hasattr(env, "step_wait")
    return is_of_baselines or is_gym_vector(env) or pool_in(env) is not None


def _check_pool(env: Any, whose: str) -> None:
    pool = pool_in(env)
    if pool is not None and not hasattr(pool, "single_action_space"):
        raise UsageError(
            f"{whose}: expected a pool with Gymnasium's interface, got the EnvPool class "
            f'{type(pool).__name__}: make it with env_type="gymnasium" and EnvPool 1.2 or newer'
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
        self._floats = [
            (index, path)
            for index, (spec, _, path) in enumerate(places(space, space, "observation"))
            if spec.dtype.startswith("float") and math.prod(spec.shape)
        ]

    def __call__(self, rows: Sequence[np.ndarray], where: Callable[[int], str]) -> None:
        """Raises ValueError unless leaves [E, ...] are finite.

        where: names environment e and its step for the message.
        """
        for index, path in self._floats:
            finite = np.isfinite(rows[index])
            if not finite.item(finite.argmin()):  # half the time of finite.all()
                e, *entry = (int(i) for i in np.argwhere(~finite)[0])
                raise ValueError(
                    f"{where(e)}: expected finite {rows[index].dtype} in the {path}, got "
                    f"{rows[index][(e, *entry)]}{f' at {entry}' if entry else ''}"
                )


def check_rewards(reward: np.ndarray, where: Callable[[int], str]) -> None:
    """Raises ValueError unless rewards [E] are finite; where: see FiniteCheck."""
    for index in np.flatnonzero(~np.isfinite(reward)).tolist():
        raise ValueError(f"{where(index)}: expected a finite reward, got {reward[index]}")


def picture_of(env: Any) -> np.ndarray | None:
    """Returns what an environment renders, uint8 [H, W, 3], or None if it renders no array."""
    draw = getattr(env, "render", None)
    try:
        picture = draw() if callable(draw) else None
    except NotImplementedError:  # as in the base class of Gymnasium
        picture = None
    return picture if isinstance(picture, np.ndarray) and picture.ndim == 3 else None


FinalInfo = Mapping[int, Mapping[str, Any]]
"""The info of the last step of each game that ended in one step, by the environment's index."""


def check_keywords(keywords: Sequence[str]) -> None:
    """Raises ValueError unless the keywords can be names of log columns."""
    if isinstance(keywords, str):
        raise ValueError(f"info_keywords must be a list of names, got the string {keywords!r}")
    for name in keywords:
        if not name or name.strip() != name or not name.isprintable() or "," in name:
            raise ValueError(
                "info_keywords become columns of the log: expected printable names without commas "
                f"or surrounding spaces, got {name!r}"
            )
    if len(set(keywords)) < len(keywords):
        raise ValueError(f"info_keywords must be unique, got {' '.join(keywords)}")


def final_info_of(env: Any) -> FinalInfo:
    """Returns what the environments gave with the games that ended in the step before; a VecEnv
    need not have it.
    """
    return getattr(env, "final_info", {})


def write_numbers(row: np.ndarray, info: FinalInfo, keyword: str) -> None:
    """Writes a keyword's number for each environment to row, float32 [E]; NaN where no game ended,
    or its info has no such number.
    """
    row[...] = math.nan
    for index, of_game in info.items():
        row[index] = number_in(of_game.get(keyword))


def numbers_of_games(info: FinalInfo, keywords: Sequence[str], games: Sequence[int]) -> np.ndarray:
    """Returns float32 [N, K]: the numbers of K keywords of N games that ended, by the indices of
    their environments; NaN where an info has no such number.
    """
    infos = [info.get(index, {}) for index in games]
    numbers = [[number_in(of_game.get(keyword)) for keyword in keywords] for of_game in infos]
    return np.array(numbers, np.float32)


def give_options(env: Any, options: Mapping[str, Any]) -> None:
    """Gives environments the options of their next resets, `reset(options=...)`.

    Raises UsageError if they do not take options.
    """
    if not hasattr(env, "set_options"):
        raise UsageError(
            f"{env.env_id} takes no options: only environments with Gymnasium's or PettingZoo's "
            "interface do, and VecEnvs with a method set_options"
        )
    env.set_options(options)


def is_reset(done: Any, episode_step: Any) -> Any:
    """Returns which rows begin an episode without a step that led there, bool; see VecStep.resets.

    done, episode_step: tensors or arrays of one shape.
    """
    return done & (episode_step == 0)


def number_in(value: Any) -> float:
    """Returns a number, or the only entry of an array of numbers; NaN for anything else."""
    try:
        array = np.asarray(value)
    except Exception:  # any object may be here, and a log must not end a run
        return math.nan
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else math.nan


def joined_info(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the numbers of all parts, by keyword."""
    joined: dict[str, list[float]] = {}
    for part in parts:
        for name, numbers in part.items():
            joined.setdefault(name, []).extend(numbers)
    return joined
