# SPDX-License-Identifier: Apache-2.0
"""EnvPool's vector environments with Gymnasium's interface, as a VecEnv.

A pool resets an ended environment in the next step that the environment gets, and ignores that
step's action. EnvPoolEnv takes this step immediately, with the ended environments only. (A pool's
reset(env_id) would start a new game after a lost life too.) Wrappers of a pool cannot be stepped in
part, so there an episode begins as the wrappers say, mostly one step late.

A pool takes seeds only when it is made, so EnvPoolEnv.reset(seed) makes it again with the same
configuration, and puts it in the place of the old one inside its wrappers.

EnvPool is not imported: what counts are the names of its classes and attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.contract import FinalInfo, VecStep, layers, pool_in
from torchbeast.core.envs.gym_vector import DISABLED, GymVectorEnv
from torchbeast.core.envs.spaces import ArrayNest, Discrete
from torchbeast.core.envs.sync_vec_env import check_actions
from torchbeast.errors import UsageError


class EnvPoolEnv(GymVectorEnv):
    """The environments of a pool.

    terminated is true when EnvPool says so, for Atari with episodic_life also when a life is lost;
    episode_end only when the whole game is over.
    """

    def __init__(self, pool: Any, env_id: str, frame_stack: int = 1) -> None:
        """Raises UsageError if the pool cannot be used.

        frame_stack: see VecEnv.frame_stack.
        """
        self._pool = pool_in(pool)
        self._game_over = np.ones(self._pool.num_envs, bool)
        with _quiet():
            super().__init__(pool, env_id)
        self.frame_stack = frame_stack

    def step(self, action: ArrayNest) -> VecStep:
        step = super().step(action)
        end = step.episode_end & (step.truncated | self._game_over)
        self.final_info = {index: self.final_info[index] for index in np.flatnonzero(end).tolist()}
        return step._replace(episode_end=end)

    def _checked_mode(self) -> str:
        config = self._pool.config
        if config["batch_size"] not in (0, self.num_envs):
            raise UsageError(
                f"{self.env_id}: expected a pool whose batch_size is its num_envs, got batch_size="
                f"{config['batch_size']} with num_envs={self.num_envs}: remove batch_size"
            )
        if config["max_num_players"] > 1:
            raise UsageError(
                f"{self.env_id}: expected an environment of one agent, got one of up to "
                f"{config['max_num_players']} players"
            )
        is_bare = self._env is self._pool
        return DISABLED if is_bare else super()._checked_mode()  # `_restart` hides the late step

    def _begin(self, seeds: list[int]) -> ArrayNest:
        old, spec_class = self._pool, type(self._pool.spec)
        config = {**old.config, "seed": 0, "env_seed": seeds}
        old.close()
        self._pool = type(old)(spec_class(spec_class.gen_config(**config)))
        for layer in layers(self._env):
            for name in [name for name, part in vars(layer).items() if part is old]:
                setattr(layer, name, self._pool)
        is_bare = self._env is old
        self._env = self._pool if is_bare else self._env
        with _quiet():
            observation, _ = self._env.reset(**({} if is_bare else {"seed": seeds[0]}))
        return self._copied(observation, self.num_envs)

    def _restart(self, ended: np.ndarray, seen: ArrayNest) -> None:
        indices = np.flatnonzero(ended)
        observation, *_ = self._env.step(self._taken[indices], indices.astype(np.int32))
        first = self._copied(observation, len(indices))
        for row, leaf in zip(flatten(seen), flatten(first), strict=True):
            row[indices] = leaf

    def _each_info(self, infos: Any, ended: np.ndarray) -> FinalInfo:
        told = super()._each_info(infos, ended)
        for index, info in told.items():
            # Only Atari games, which may lose lives, say in their info whether the game is over.
            self._game_over[index] = info.get("terminated", True)
        return told

    def _actions(self, action: ArrayNest) -> Any:
        if isinstance(self.action_space, Discrete):
            # EnvPool's games read outside their arrays for an action that they do not have.
            self._taken = check_actions(action, self.action_space, self.num_envs)
        else:
            self._taken = super()._actions(action)
        return self._taken


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops Gymnasium's warnings about the float64 bounds of EnvPool's float32 spaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
