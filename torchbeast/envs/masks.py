# SPDX-License-Identifier: Apache-2.0
"""Action masks that an environment gives outside its observations, in info["action_mask"]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from torchbeast.core.envs.agents import has_agents
from torchbeast.core.envs.contract import MASK, check_environment
from torchbeast.core.envs.spaces import Box, Discrete, MultiDiscrete, declared, from_gymnasium
from torchbeast.envs.spec import EnvError


class MaskFromInfo:
    """An environment of Gymnasium's interface that observes its info["action_mask"].

    A dict observation gets the entry `action_mask`; another becomes {"observation": it,
    "action_mask": mask}. The mask is bool [n], with n the number of a Discrete space's actions or
    sum(nvec) of a MultiDiscrete or integer Box, whose info may also have a tuple of one array for
    each choice.

    The last observation of an episode needs no mask: without one it allows every action.
    """

    def __init__(self, env: Any) -> None:
        """Raises UsageError unless this is an environment."""
        check_environment(env, _name(env))
        if has_agents(env):
            raise EnvError(
                f"mask_actions reads the mask of one agent, but {_name(env)} is a game of several: "
                f"add an {MASK} to its observations, and remove mask_actions"
            )
        self._env = env

    @property
    def observation_space(self) -> Any:
        """The environment's space with an entry for the mask."""
        space = getattr(self._env, "observation_space", None)
        try:
            said = declared(space)
        except ValueError:
            return space  # SyncVecEnv says why it cannot be used
        return None if said is None else _with_mask(said, None)

    @cached_property
    def _size(self) -> int:
        """The number of choices; raises EnvError unless the actions can be masked."""
        space = from_gymnasium(self._env.action_space)
        if isinstance(space, Discrete):
            return space.n
        if isinstance(space, MultiDiscrete) or (isinstance(space, Box) and space.is_integer):
            return sum(space.nvec)
        raise EnvError(
            f"mask_actions needs a Discrete or MultiDiscrete action space, but {_name(self._env)} "
            f"has a {type(space).__name__}: remove it"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_env"], name)

    def reset(self, *, seed: int | None = None, **more: Any) -> tuple[Any, Mapping[str, Any]]:
        """Resets the environment; returns the masked observation and the info."""
        result = self._env.reset(seed=seed, **more)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise EnvError(
                "mask_actions needs the info dict that reset() of Gymnasium returns, but "
                f"{_name(self._env)} returns none: put an {MASK} into its observations"
            )
        observation, info = result
        return _with_mask(observation, self._mask(info, is_last=False)), info

    def step(self, action: Any) -> tuple[Any, ...]:
        """Executes an action; returns the values of the environment, the observation masked."""
        observation, reward, *ends, info = self._env.step(action)
        masked = _with_mask(observation, self._mask(info, is_last=any(ends)))
        return masked, reward, *ends, info

    def _mask(self, info: Mapping[str, Any], is_last: bool) -> np.ndarray:
        """Returns the mask bool [n]."""
        size = self._size  # before a mask is missed that no action space could have
        if MASK not in info:
            if is_last:
                return np.ones(size, bool)
            raise EnvError(
                f"mask_actions needs info['{MASK}'] at every step, but {_name(self._env)} returned "
                f"{', '.join(map(repr, info)) or 'an empty info'}: remove mask_actions"
            )
        given = info[MASK]
        mask = np.concatenate(given) if isinstance(given, tuple) else np.asarray(given)
        if mask.shape != (size,):
            raise EnvError(
                f"{_name(self._env)}: info['{MASK}'] needs the shape ({size},), an entry for "
                f"each action, got {mask.shape}"
            )
        return mask.astype(bool)


def masked_from_info(env_fn: Callable[..., Any]) -> Callable[..., MaskFromInfo]:
    """Returns a function that makes the same environments, with masks in their observations."""
    return lambda **kwargs: MaskFromInfo(env_fn(**kwargs))


def _with_mask(observation: Any, mask: Any) -> dict[str, Any]:
    """Adds the mask to a dict observation, or makes a dict of any other; or of their spaces."""
    entries = observation if isinstance(observation, dict) else {"observation": observation}
    return {**entries, MASK: mask}


def _name(env: Any) -> str:
    spec = getattr(env, "spec", None)
    return getattr(spec, "id", None) or type(getattr(env, "unwrapped", env)).__name__
