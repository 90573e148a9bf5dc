# SPDX-License-Identifier: Apache-2.0
"""Python environments as a VecEnv, and how the results of one environment's step are read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.envs import contract, spaces
from torchbeast.core.envs.selection import check_keys, select
from torchbeast.errors import UsageError, as_usage_error


def environment_seeds(seed: int, num_envs: int) -> list[int]:
    """Returns a seed in 0, ..., 2**31 - 1 for each environment, derived from (seed, index)."""
    sequences = (np.random.SeedSequence((seed, index)) for index in range(num_envs))
    return [int(sequence.generate_state(1)[0] >> 1) for sequence in sequences]


def check_actions(
    action: spaces.ArrayNest, space: spaces.Discrete | spaces.MultiDiscrete, num_envs: int
) -> np.ndarray:
    """Returns actions as int64 [E], or [E, n] of a MultiDiscrete.

    Raises ValueError unless they are one of `space` for each of the num_envs environments.
    """
    array = np.asarray(action)
    low: Any = getattr(space, "start", 0)
    count: Any = space.n if isinstance(space, spaces.Discrete) else np.array(space.nvec)
    shape, high = (num_envs, *np.shape(count)), low + count - 1
    if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"expected integer actions of shape {shape}, got {array.dtype} of {array.shape}"
        )
    if (array < low).any() or (array > high).any():
        raise ValueError(f"expected actions between {low} and {high}, got {array.tolist()}")
    return array.astype(np.int64, copy=False)


class PythonVecEnv(contract.OwnVecEnv):
    """Base class of vector environments that step Python environments one after the other."""

    final_info: contract.FinalInfo = MappingProxyType({})
    _kind = "environment"  # what messages call one of them
    _envs: list[Any]
    _options: Mapping[str, Any] = MappingProxyType({})  # of the next resets

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Gives the environments options, which each gets whenever it is reset from now on.

        Any thread may call it. Raises UsageError if an environment's `reset` takes no options.
        """
        for index, env in enumerate(self._envs):
            check_takes_options(env, self._name(index))
        self._options = dict(options)

    def render(self) -> np.ndarray | None:
        """Returns a picture of environment 0, uint8 [H, W, 3], or None when it renders no array."""
        return contract.picture_of(self._envs[0])

    def close(self) -> None:
        """Closes every environment."""
        close_all(self._envs)

    def _name(self, index: int) -> str:
        return f"{self._kind} {index} of {self.env_id}"


class SyncVecEnv(PythonVecEnv):
    """E Python environments of one kind, stepped one after the other.

    Both interfaces are accepted and told apart by the number of values that step returns:

    * five, Gymnasium: reset(seed=...) -> (observation, info) and
      step(action) -> (observation, reward, terminated, truncated, info);
    * four, legacy Gym: reset() -> observation and step(action) -> (observation, reward, done,
      info), where info may hold "TimeLimit.truncated"; seed(s), if there is one, seeds it.

    A pair that reset returns is an observation and its info if the second one is a dict.

    The first environment's observation_space decides structure, shapes and dtypes; where it
    declares nothing usable, its first observation does. Values of another dtype are converted where
    that keeps them, for example float64 to float32, and integers to floats; everything else, and
    NaN or infinity, is a ValueError. Observations are copied immediately, because environments
    reuse their buffers. Environments receive actions as numpy scalars or arrays; actions of a Box
    are clipped to its bounds. Exceptions of an environment propagate unchanged.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        env_id: str,
        observation_keys: Sequence[str] = (),
    ) -> None:
        """Makes the environments.

        Args:
            env_fns: One function for each environment.
            env_id: The name of the environments.
            observation_keys: Entries of dict observations to keep; (): all.

        Raises:
            UsageError: If a function makes something else than an environment, spaces cannot be
                used, or an action space differs from the first one's.
        """
        self.env_id = env_id
        self.num_envs = len(env_fns)
        self.observation_keys = tuple(observation_keys)
        self._envs = []
        try:
            self._envs += (make_env() for make_env in env_fns)
            self._read_spaces()
        except BaseException:
            with suppress(Exception):  # of closing: the first error says what is wrong
                close_all(self._envs)
            raise
        self._specs: list[spaces.ArraySpec] = flatten(self.observation_space)
        self._row: tuple[np.dtype[Any], tuple[int, ...]] | None = None  # of a space of one array
        if isinstance(space := self.observation_space, spaces.ArraySpec):
            self._row = np.dtype(space.dtype), space.shape
        self._check_finite = contract.FiniteCheck(self.observation_space)
        self._steps = 0  # since the environments were made
        self._began = [0] * self.num_envs  # the step at which the episode began

    def _read_spaces(self) -> None:
        """Raises UsageError for spaces that cannot be used, or that differ."""
        env = self._envs[0]
        self.action_space = self._action_space_of(0)
        for index in range(1, self.num_envs):
            if (actions := self._action_space_of(index)) != self.action_space:
                raise UsageError(
                    f"{self._name(index)}: expected the action space {self.action_space} of "
                    f"environment 0, got {actions}"
                )
        with as_usage_error(self._name(0)):
            self._declared = spaces.declared(getattr(env, "observation_space", None))
        self.observation_space: spaces.ObservationSpace = self._space_of(reset_one(env, None, {}))

    def outermost(self, name: str) -> Any:
        """Returns an attribute of the first environment from its outermost wrapper that has it, or
        None. Gymnasium's wrappers do not forward attributes.
        """
        env = self._envs[0]
        while not hasattr(env, name) and hasattr(env, "env"):
            env = env.env
        return getattr(env, name, None)

    def reset(self, seed: int) -> spaces.ArrayNest:
        """Starts an episode in every environment; returns observations, leaves [E, ...]."""
        rows = self._empty_rows()
        self.final_info = {}
        for index, env_seed in enumerate(environment_seeds(seed, self.num_envs)):
            self._write_first(rows, index, env_seed)
        self._check_finite(rows, self._at_step)
        return pack_as(self.observation_space, rows)

    def step(self, action: spaces.ArrayNest) -> contract.VecStep:
        """Executes an action per environment, leaves [E, ...]; resets an environment that ended."""
        rows = self._empty_rows()
        self._steps += 1
        reward = np.empty(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        finals: list[list[np.ndarray]] = []
        infos: dict[int, Mapping[str, Any]] = {}
        actions = in_bounds(self.action_space, action, self.num_envs)
        if not isinstance(actions, np.ndarray):  # a nest of arrays
            actions = [map_leaves(itemgetter(index), actions) for index in range(self.num_envs)]
        for index, (env, one_action) in enumerate(zip(self._envs, actions, strict=True)):
            result = env.step(one_action)
            observation, reward[index], over, cut, info = read_step(result, self._at_step, index)
            self._write(rows, index, observation)
            if over or cut:
                terminated[index], truncated[index] = over, cut
                if cut:
                    finals.append(self._final(rows, index))
                infos[index] = dict(info)  # before the reset, which may write to it
                self._write_first(rows, index, None)
        self._check_finite(rows, self._at_step)
        self.final_info = infos
        ended = terminated | truncated
        last = [np.concatenate(leaf) for leaf in zip(*finals, strict=True)]
        final = pack_as(self.observation_space, last) if finals else None
        seen = pack_as(self.observation_space, rows)
        return contract.VecStep(seen, reward, terminated, truncated, ended, final)

    def _at_step(self, index: int) -> str:
        return f"{self._name(index)}, step {self._steps - self._began[index]} of the episode"

    def _action_space_of(self, index: int) -> spaces.ActionSpace:
        contract.check_environment(self._envs[index], self._name(index))
        with as_usage_error(f"{self._name(index)}: action space"):
            return spaces.from_gymnasium(self._envs[index].action_space)

    def _space_of(self, first: Any) -> spaces.ObservationSpace:
        keys, path = self.observation_keys, f"{self._name(0)}: observation"
        check_keys(first, keys, self._name(0))
        seen = select(first, keys)
        with as_usage_error():
            space = spaces.observation_space_of(seen, select(self._declared, keys), path)
            list(spaces.matching_leaves(space, seen, path))  # raises where they differ
        return space

    # --- observations: lists of leaves, written row by row into [E, ...] arrays

    def _empty_rows(self) -> list[np.ndarray]:
        return [np.empty((self.num_envs, *spec.shape), spec.dtype) for spec in self._specs]

    def _write(self, rows: list[np.ndarray], index: int, observation: Any) -> None:
        if type(observation) is np.ndarray and self._row == (observation.dtype, observation.shape):
            rows[0][index] = observation  # without the cost of a nest
            return
        selected = select(observation, self.observation_keys)
        path = f"{self._at_step(index)}: observation"
        leaves = spaces.matching_leaves(self.observation_space, selected, path)
        for row, leaf in zip(rows, leaves, strict=True):
            row[index] = leaf

    def _write_first(self, rows: list[np.ndarray], index: int, seed: int | None) -> None:
        first = reset_one(self._envs[index], seed, self._options)
        self._began[index] = self._steps
        self._write(rows, index, first)

    def _final(self, rows: list[np.ndarray], index: int) -> list[np.ndarray]:
        """Returns the leaves of the last observation of an episode that is cut."""
        final = [row[index : index + 1].copy() for row in rows]
        self._check_finite(final, lambda _: self._at_step(index))
        return final


def read_step(
    result: Any, where: Callable[[int], str], index: int
) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Returns observation, reward, terminated, truncated and info, from what one environment's step
    returned in the interface of Gymnasium or legacy Gym.

    where: names environment `index` and its step for the message of a ValueError.
    """
    check_step(result, where, index)
    observation, info = result[0], result[-1]
    # Asking for the type itself first saves a slow search among the subclasses of Mapping.
    info = info if type(info) is dict or isinstance(info, Mapping) else {}
    reward, ended = _finite(result[1], where, index), _flag(result[2], where, index)
    if len(result) == 5:
        return observation, reward, ended, _flag(result[3], where, index) and not ended, info
    is_cut = ended and bool(info.get("TimeLimit.truncated", False))
    return observation, reward, ended and not is_cut, is_cut, info


def check_step(result: Any, where: Callable[[int], str], index: int) -> None:
    """Raises ValueError unless a step returned four or five values; see read_step."""
    if not isinstance(result, tuple) or len(result) not in (4, 5):
        count = f" of {len(result)} values" if isinstance(result, tuple) else ""
        raise ValueError(
            f"{where(index)}: step returned {type(result).__name__}{count}, expected "
            "(observation, reward, terminated, truncated, info) or "
            "(observation, reward, done, info)"
        )


def _flag(value: Any, where: Callable[[int], str], index: int) -> bool:
    """Returns whether an episode is over, from a value that step returned."""
    if isinstance(value, (bool, np.bool_)):  # the usual case
        return bool(value)
    if math.isnan(number := contract.number_in(value)):
        raise ValueError(
            f"{where(index)}: step returned {value!r}, expected True or False as terminated, "
            "truncated or done"
        )
    return bool(number)


def _finite(reward: Any, where: Callable[[int], str], index: int) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = contract.number_in(reward)
    if not abs(value) <= _LARGEST_REWARD:
        raise ValueError(f"{where(index)}: expected a finite reward, got {reward!r}")
    return value


def in_bounds(space: spaces.ActionSpace, action: spaces.ArrayNest, num_envs: int) -> Any:
    """Returns actions, leaves [E, ...], of which a Box's are clipped to its bounds."""
    return map_leaves2(lambda leaf, rows: _in_bounds(leaf, rows, num_envs), space, action)


def _in_bounds(space: Any, leaf: Any, num_envs: int) -> np.ndarray:
    rows = np.asarray(leaf)
    if rows.shape[:1] != (num_envs,):
        raise ValueError(f"expected actions for {num_envs} environments, got {rows.shape}")
    if not isinstance(space, spaces.Box):
        return rows
    return np.clip(rows, *space.bounds).astype(space.dtype)


_LARGEST_REWARD = float(np.finfo(np.float32).max)


def check_takes_options(env: Any, whose: str) -> None:
    """Raises UsageError if an environment's reset takes no options; whose: its name."""
    if not accepts(env.reset, "options") and not accepts_any(env.reset):
        raise UsageError(
            f"{whose} takes no options: add a parameter `options` to its reset, like Gymnasium's "
            "environments"
        )


def close_all(envs: Sequence[Any]) -> None:
    """Closes environments that can be closed, the others too if one of them fails."""
    with ExitStack() as stack:
        for env in envs:
            if hasattr(env, "close"):
                stack.callback(env.close)


def reset_one(env: Any, seed: int | None, options: Mapping[str, Any]) -> Any:
    """Resets the environment, seeded if a seed is given and the environment accepts one; returns
    its observation.
    """
    arguments: dict[str, Any] = {"options": dict(options)} if options else {}
    if seed is not None:
        has_parameter = accepts(env.reset, "seed")
        if not has_parameter and callable(getattr(env, "seed", None)):  # legacy Gym
            env.seed(seed)
        elif has_parameter or accepts_any(env.reset):  # of a wrapper, which forwards it
            arguments["seed"] = seed
    result = env.reset(**arguments)
    # Legacy Gym returns the observation without an info.
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    return result[0] if is_pair else result


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns whether the function has a parameter called `name`."""
    return name in parameters_of(function)


def accepts_any(function: Callable[..., Any]) -> bool:
    """Returns whether the function has a parameter like **kwargs."""
    kinds = [parameter.kind for parameter in parameters_of(function).values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; {} if they are unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C callable without a signature
        return {}
