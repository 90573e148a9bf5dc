# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's own vector environments, such as gymnasium.make_vec gives, as a VecEnv.

A VecEnv begins the next episode in the step that ends one. Their autoreset mode decides how:

    SAME_STEP             they do so too, and give the last observations in their infos
    NEXT_STEP, DISABLED   ended environments are reset immediately, by Gymnasium's reset_mask; with
                          NEXT_STEP only SyncVectorEnv and AsyncVectorEnv allow that

Gymnasium is not imported: what counts are the names of its classes and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.envs.contract import FinalInfo, FiniteCheck, env_repr
from torchbeast.core.envs.spaces import (
    ArrayNest,
    ArraySpec,
    from_gymnasium,
    matching_leaves,
    observation_spec,
)
from torchbeast.core.envs.vec_env import VecStep, action_rows, environment_seeds
from torchbeast.errors import UsageError

_SAME_STEP = "SameStep"
_MODES = (_SAME_STEP, "NextStep", "Disabled")


def adopted(env: Any, env_id: str) -> GymVectorEnv:
    """Returns the VecEnv of a vector environment of Gymnasium, which is closed where that fails."""
    try:
        return GymVectorEnv(env, env_id)
    except Exception:
        env.close()
        raise


class GymVectorEnv:
    """The environments of a vector environment of Gymnasium."""

    frame_stack = 1
    final_info: FinalInfo

    def __init__(self, env: Any, env_id: str) -> None:
        """Raises UsageError where spaces or the autoreset mode cannot be used."""
        self._env = env
        self.env_id = env_id
        self.num_envs = int(env.num_envs)
        self._is_own = _is_own(env)
        self._mode = _mode(env, env_id, self._is_own)
        try:
            self.observation_space = observation_spec(env.single_observation_space)
            self.action_space = from_gymnasium(env.single_action_space)
        except ValueError as error:
            raise UsageError(f"{env_id}: {error}") from error
        self._batch = map_leaves(
            lambda spec: ArraySpec((self.num_envs, *spec.shape), spec.dtype), self.observation_space
        )
        self._check_finite = FiniteCheck(self.observation_space)
        self._steps = np.zeros(self.num_envs, np.int64)  # of the running episodes
        self.final_info = {}

    def reset(self, seed: int) -> ArrayNest:
        seeds = environment_seeds(seed, self.num_envs)
        observation, _ = self._env.reset(seed=seeds if self._is_own else seeds[0])
        self.final_info = {}
        self._steps[:] = 0
        seen = self._copied(observation)
        self._check(seen, range(self.num_envs))
        return seen

    def step(self, action: ArrayNest) -> VecStep:
        observation, reward, terminated, truncated, infos = self._env.step(self._actions(action))
        reward = np.array(reward, np.float32)
        for index in np.flatnonzero(~np.isfinite(reward)):
            raise ValueError(
                f"environment {index} of {self.env_id}: expected a finite reward, got "
                f"{reward[index]}"
            )
        terminated = np.array(terminated, bool)
        truncated = np.asarray(truncated, bool) & ~terminated
        ended = terminated | truncated
        self._steps += 1
        seen, self.final_info = self._copied(observation), {}
        final: ArrayNest | None = None
        if ended.any():
            is_same = self._mode == _SAME_STEP
            self.final_info = _each_info(infos["final_info"] if is_same else infos, ended)
            if truncated.any():
                ours = map_leaves(lambda leaf: leaf[truncated], seen)
                final = self._final(infos, truncated) if is_same else ours
                self._check(final, np.flatnonzero(truncated))
            if not is_same:
                observation, _ = self._env.reset(options={"reset_mask": ended.copy()})
                seen = self._copied(observation)
            self._steps[ended] = 0
        self._check(seen, range(self.num_envs))
        return VecStep(seen, reward, terminated, truncated, ended, final)

    __repr__ = env_repr

    def close(self) -> None:
        self._env.close()

    def _check(self, observation: ArrayNest, indices: Sequence[int] | np.ndarray) -> None:
        """Raises ValueError unless the observations of these environments are finite."""

        def where(row: int) -> str:
            index = indices[row]
            return f"environment {index} of {self.env_id}, step {self._steps[index]} of the episode"

        self._check_finite(flatten(observation), where)

    def _copied(self, observation: Any) -> ArrayNest:
        """Returns copies of the observations: the environment may use its arrays again."""
        path = f"{self.env_id}: observation"
        leaves = [np.array(leaf) for leaf in matching_leaves(self._batch, observation, path)]
        return pack_as(self.observation_space, leaves)

    def _final(self, infos: Mapping[str, Any], truncated: np.ndarray) -> ArrayNest:
        """Returns the last observations [K, ...] of the truncated episodes, from the infos."""
        path = f"{self.env_id}: last observation"
        finals = [
            list(matching_leaves(self.observation_space, infos["final_obs"][index], path))
            for index in np.flatnonzero(truncated)
        ]
        return pack_as(
            self.observation_space, [np.stack(leaf) for leaf in zip(*finals, strict=True)]
        )

    def _actions(self, action: ArrayNest) -> Any:
        spaces = flatten(self.action_space)
        pairs = zip(spaces, flatten(action), strict=True)
        return pack_as(self.action_space, [action_rows(*pair, self.num_envs) for pair in pairs])


def _mode(env: Any, env_id: str, is_own: bool) -> str:
    """Returns the value of the autoreset mode; raises UsageError for one that cannot be used."""
    found = getattr(env, "metadata", {}).get("autoreset_mode")
    mode = str(getattr(found, "value", found))
    if mode not in _MODES:
        raise UsageError(
            f"{env_id} is a vector environment whose metadata have no autoreset_mode of Gymnasium "
            f"1.1 or newer, got {found!r}: make it with such a Gymnasium"
        )
    if mode == "NextStep" and not (is_own and getattr(env.unwrapped, "shared_memory", True)):
        raise UsageError(
            f"{env_id} resets one step late (autoreset_mode NEXT_STEP) and cannot be reset "
            'earlier: give gymnasium.make_vec vectorization_mode="sync" or "async", or '
            "autoreset_mode SAME_STEP; AsyncVectorEnv needs shared_memory as well"
        )
    return mode


def _is_own(env: Any) -> bool:
    """Returns whether it is one of Gymnasium's two vector environments of single ones."""
    names = {cls.__name__ for cls in type(env.unwrapped).__mro__}
    return bool(names & {"SyncVectorEnv", "AsyncVectorEnv"})


def _each_info(infos: Mapping[str, Any], ended: np.ndarray) -> FinalInfo:
    """Returns the entries of each environment that ended; the mask of an entry `x` is `_x`."""
    return {
        int(index): {
            key: values[index]
            for key, values in infos.items()
            if isinstance(values, np.ndarray) and f"_{key}" in infos and infos[f"_{key}"][index]
        }
        for index in np.flatnonzero(ended)
    }
