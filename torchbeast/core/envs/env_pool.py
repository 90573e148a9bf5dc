# SPDX-License-Identifier: Apache-2.0
"""EnvPool's vector environments with Gymnasium's interface, as a VecEnv.

A pool resets an ended environment in the next step that the environment gets, and ignores that
step's action. EnvPoolEnv takes this step immediately, with the ended environments only. (A pool's
reset(env_id) would start a new game after a lost life too.)

A pool takes seeds only when it is made, so EnvPoolEnv.reset(seed) makes it again with the same
configuration.

EnvPool is not imported: what counts are the names of its classes and attributes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.contract import FinalInfo
from torchbeast.core.envs.gym_vector import DISABLED, GymVectorEnv
from torchbeast.core.envs.spaces import ArrayNest, Discrete
from torchbeast.core.envs.vec_env import VecStep, check_actions
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
        self._game_over = np.ones(pool.num_envs, bool)
        with _quiet():
            super().__init__(pool, env_id)
        self.frame_stack = frame_stack

    def step(self, action: ArrayNest) -> VecStep:
        step = super().step(action)
        end = step.truncated | (step.terminated & self._game_over)
        self.final_info = {index: self.final_info[index] for index in np.flatnonzero(end).tolist()}
        return step._replace(episode_end=end)

    def _checked_mode(self) -> str:
        config = self._env.config
        if "env_seed" not in config:
            raise UsageError(
                f"{self.env_id}: this EnvPool takes no seed for each environment; TorchBeast needs "
                "EnvPool 1.2 or newer: pip install --upgrade 'torchbeast[envpool]'"
            )
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
        return DISABLED  # `_restart` hides the late step

    def _begin(self, seeds: list[int]) -> ArrayNest:
        pool, spec_class = type(self._env), type(self._env.spec)
        config = {**self._env.config, "seed": 0, "env_seed": seeds}
        self._env.close()
        self._env = pool(spec_class(spec_class.gen_config(**config)))
        with _quiet():
            observation, _ = self._env.reset()
        return self._copied(observation, self.num_envs)

    def _restart(self, ended: np.ndarray, seen: ArrayNest) -> None:
        indices = np.flatnonzero(ended)
        observation, *_ = self._env.step(self._taken[indices], indices.astype(np.int32))
        first = self._copied(observation, len(indices))
        for row, leaf in zip(flatten(seen), flatten(first), strict=True):
            row[indices] = leaf

    def _each_info(self, infos: Mapping[str, Any], ended: np.ndarray) -> FinalInfo:
        # Only Atari games, which may lose lives, say in their info whether the game is over.
        over = infos.get("terminated", True)
        self._game_over = np.broadcast_to(np.asarray(over, bool), ended.shape)
        arrays = {key: values for key, values in infos.items() if isinstance(values, np.ndarray)}
        return {
            int(index): {key: values[index] for key, values in arrays.items()}
            for index in np.flatnonzero(ended)
        }

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
