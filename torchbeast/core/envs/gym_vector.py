# SPDX-License-Identifier: Apache-2.0
"""Vector environments of Gymnasium's interface, such as gymnasium.make_vec gives, as a VecEnv.

A VecEnv begins the next episode in the step that ends one. Their autoreset mode decides how:

    SAME_STEP   they do so too, and give the last observations in their infos: an observation for
                each environment, or a batch of all. Without them nothing can be bootstrapped from,
                so that time limits count as terminations
    DISABLED    ended environments are reset immediately, by Gymnasium's reset_mask
    NEXT_STEP   SyncVectorEnv and AsyncVectorEnv with shared memory too; others, and wrappers of
                these, begin the next episode one step late, in a row of VecStep.resets

Environments whose `device` is a torch.device or its name take and return tensors.

EnvPool's environments have the same interface, with two differences. A pool resets an ended
environment in the next step that the environment gets, and ignores that step's action. EnvPoolEnv
takes this step immediately, with the ended environments only. (A pool's reset(env_id) would start a
new game after a lost life too.) Wrappers of a pool cannot be stepped in part, so there an episode
begins as the wrappers say, mostly one step late. And a pool takes seeds only when it is made, so
EnvPoolEnv.reset(seed) makes it again with the same configuration, and puts it in the place of the
old one inside its wrappers.

Neither Gymnasium nor EnvPool is imported: what counts are the names of classes and attributes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.envs import contract, spaces
from torchbeast.core.envs.selection import check_keys, select
from torchbeast.core.envs.sync_vec_env import check_actions, environment_seeds, in_bounds
from torchbeast.errors import UsageError, as_usage_error

_log = logging.getLogger("torchbeast.gym_vector")

_MODES = _SAME_STEP, _NEXT_STEP, _DISABLED = "SameStep", "NextStep", "Disabled"


def with_gym_interface(env: Any, env_id: str) -> Any:
    """Returns a vector environment with Gymnasium's interface for an environment of
    Stable-Baselines3 or of tensors; others unchanged.
    """
    if hasattr(env, "step_async") and not contract.is_gym_vector(env):
        return _OfStableBaselines(env)
    return _OfTensors(env, env_id) if _has_tensors(env) else env


_RESULTS = ("reward", "terminated", "truncated")


class GymVectorEnv(contract.OwnVecEnv):
    """The environments of a vector environment of Gymnasium."""

    final_info: contract.FinalInfo

    def __init__(self, env: Any, env_id: str, observation_keys: Sequence[str] = ()) -> None:
        """Raises UsageError where spaces or the autoreset mode cannot be used.

        observation_keys: see SyncVecEnv.
        """
        self._env = env
        self.env_id = env_id
        self.num_envs = int(contract.attribute_of(env, "num_envs"))
        self._mode = self._checked_mode()
        self._keys = tuple(observation_keys)
        with as_usage_error(env_id):
            space = spaces.declared(contract.attribute_of(env, "single_observation_space"))
        check_keys(space, self._keys, env_id)
        with as_usage_error(env_id):
            self.observation_space = spaces.observation_spec(select(space, self._keys))
            self.action_space = spaces.from_gymnasium(
                contract.attribute_of(env, "single_action_space")
            )
        self._check_finite = contract.FiniteCheck(self.observation_space)
        self._steps = np.zeros(self.num_envs, np.int64)  # of the running episodes
        self._late = np.zeros(self.num_envs, bool)  # ended, and begin again with the next step
        self._has_warned = False
        self.final_info = {}

    def reset(self, seed: int) -> spaces.ArrayNest:
        seen = self._begin(environment_seeds(seed, self.num_envs))
        self.final_info = {}
        self._steps[:] = 0
        self._late = np.zeros(self.num_envs, bool)  # the caller has the one before
        self._check(seen, range(self.num_envs))
        return seen

    def step(self, action: spaces.ArrayNest) -> contract.VecStep:
        observation, reward, terminated, truncated, infos = self._env.step(self._actions(action))
        for what, values in zip(_RESULTS, (reward, terminated, truncated), strict=True):
            if np.shape(values) != (self.num_envs,):
                raise ValueError(
                    f"{self.env_id}: step returned {what} of shape {np.shape(values)}, expected "
                    f"({self.num_envs},)"
                )
        resets, self._late = self._late, np.zeros(self.num_envs, bool)
        reward = np.where(resets, 0.0, reward).astype(np.float32)
        contract.check_rewards(reward, lambda index: f"environment {index} of {self.env_id}")
        terminated = np.asarray(terminated, bool) & ~resets
        truncated = np.asarray(truncated, bool) & ~(terminated | resets)
        is_same = self._mode == _SAME_STEP
        last = infos.get("final_obs", infos.get("final_observation")) if is_same else observation
        if last is None and truncated.any():
            self._warn()
            terminated, truncated = terminated | truncated, np.zeros_like(truncated)
        ended = terminated | truncated
        self._steps += ~resets
        seen, self.final_info = self._copied(observation, self.num_envs), {}
        final: spaces.ArrayNest | None = None
        if ended.any():
            told = infos.get("final_info", {}) if is_same else infos
            self.final_info = self._each_info(told, ended)
            if truncated.any():
                ours = map_leaves(lambda leaf: leaf[truncated], seen)
                final = self._final(last, truncated) if is_same else ours
                self._check(final, np.flatnonzero(truncated))
            if self._mode == _NEXT_STEP:
                self._late = ended
                mask = seen.get(contract.MASK) if isinstance(seen, dict) else None
                if isinstance(mask, np.ndarray):
                    mask[ended] = 1  # of the last observation; the next action is ignored
            elif self._mode == _DISABLED:
                for row, leaf in zip(flatten(seen), flatten(self._restart(ended)), strict=True):
                    row[ended] = leaf
            self._steps[ended] = 0
        self._check(seen, range(self.num_envs))
        return contract.VecStep(seen, reward, terminated | resets, truncated, ended, final, resets)

    def render(self) -> np.ndarray | None:
        """Returns a picture of environment 0, uint8 [H, W, 3], or None when it renders no array."""
        if contract.attribute_of(self._env, "render_mode") != "rgb_array":
            return None
        drawn: Any = self._env.render()
        has_all = isinstance(drawn, (tuple, list)) or getattr(drawn, "ndim", 0) == 4
        first = drawn[0] if has_all and len(drawn) else drawn
        return first if isinstance(first, np.ndarray) and first.ndim == 3 else None

    def close(self) -> None:
        self._env.close()

    def _check(self, observation: spaces.ArrayNest, indices: Sequence[int] | np.ndarray) -> None:
        """Raises ValueError unless the observations of these environments are finite."""

        def where(row: int) -> str:
            index = indices[row]
            return f"environment {index} of {self.env_id}, step {self._steps[index]} of the episode"

        self._check_finite(flatten(observation), where)

    def _checked_mode(self) -> str:
        """Returns the autoreset mode, or DISABLED for NEXT_STEP if the environment can be reset
        earlier; raises UsageError for an unknown mode.
        """
        declared = _declared_mode(self._env)
        mode = str(getattr(declared, "value", declared))
        if mode not in _MODES:
            raise UsageError(
                f"{self.env_id} is a vector environment whose metadata have no autoreset_mode of "
                f"Gymnasium 1.1 or newer, got {declared!r}: update Gymnasium, or set "
                f'metadata["autoreset_mode"] of your own class to one of {", ".join(_MODES)}'
            )
        # Wrappers may refuse a reset of some environments, or forget their statistics of all.
        is_bare = self._env is contract.innermost(self._env) and _is_own(self._env)
        can_be_early = is_bare and getattr(self._env, "shared_memory", True)
        return _DISABLED if mode == _NEXT_STEP and can_be_early else mode

    def _begin(self, seeds: list[int]) -> spaces.ArrayNest:
        """Starts an episode in every environment; returns the first observations [E, ...]."""
        observation, _ = self._env.reset(seed=seeds if _is_own(self._env) else seeds[0])
        return self._copied(observation, self.num_envs)

    def _restart(self, ended: np.ndarray) -> spaces.ArrayNest:
        """Starts an episode in the environments that ended; returns their first observations."""
        observation, _ = self._env.reset(options={"reset_mask": ended.copy()})
        return map_leaves(lambda leaf: leaf[ended], self._copied(observation, self.num_envs))

    def _copied(self, observation: Any, count: int) -> spaces.ArrayNest:
        """Returns copies [count, ...] of observations: the environment may use its arrays again."""
        batch = map_leaves(
            lambda spec: spaces.ArraySpec((count, *spec.shape), spec.dtype), self.observation_space
        )
        path = f"{self.env_id}: observation"
        theirs = spaces.matching_leaves(batch, select(observation, self._keys), path)
        leaves = [np.array(leaf) for leaf in theirs]
        return pack_as(self.observation_space, leaves)

    def _final(self, last: Any, truncated: np.ndarray) -> spaces.ArrayNest:
        """Returns the last observations [K, ...] of the truncated episodes.

        last: an array or list with an observation for each environment, or a nest of such arrays.
        """
        path = f"{self.env_id}: last observation"
        finals = [
            spaces.matching_leaves(
                self.observation_space, select(_row(last, index), self._keys), path
            )
            for index in np.flatnonzero(truncated).tolist()
        ]
        leaves = [np.stack(leaf) for leaf in zip(*finals, strict=True)]
        return pack_as(self.observation_space, leaves)

    def _each_info(self, infos: Any, ended: np.ndarray) -> contract.FinalInfo:
        """Returns the entries of each environment that ended.

        infos: a sequence with a dict for each environment, or a dict of arrays [E, ...]; there the
        mask of an entry `x` is `_x`, or there is none.
        """
        indices = np.flatnonzero(ended).tolist()
        if not isinstance(infos, Mapping):
            return {index: infos[index] or {} for index in indices}
        entries = {
            key: (values, infos.get(f"_{key}", ended))
            for key, values in infos.items()
            if isinstance(values, np.ndarray) and values.shape[:1] == ended.shape
        }
        return {
            index: {key: values[index] for key, (values, has) in entries.items() if has[index]}
            for index in indices
        }

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the infos of %s lack the last observations of truncated episodes (final_obs), so "
                "its time limits count as terminations",
                self.env_id,
            )

    def _actions(self, action: spaces.ArrayNest) -> Any:
        return in_bounds(self.action_space, action, self.num_envs)


class EnvPoolEnv(GymVectorEnv):
    """The environments of a pool.

    terminated is true when EnvPool says so, for Atari with episodic_life also when a life is lost;
    episode_end only when the whole game is over.
    """

    def __init__(self, pool: Any, env_id: str, frame_stack: int = 1) -> None:
        """Raises UsageError if the pool cannot be used.

        frame_stack: see VecEnv.frame_stack.
        """
        self._pool = contract.pool_in(pool)
        self._game_over = np.ones(self._pool.num_envs, bool)
        with _quiet():
            super().__init__(pool, env_id)
        self.frame_stack = frame_stack

    def step(self, action: spaces.ArrayNest) -> contract.VecStep:
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
        return _DISABLED if is_bare else super()._checked_mode()  # `_restart` hides the late step

    def _begin(self, seeds: list[int]) -> spaces.ArrayNest:
        old, spec_class = self._pool, type(self._pool.spec)
        config = {**old.config, "seed": 0, "env_seed": seeds}
        old.close()
        self._pool = type(old)(spec_class(spec_class.gen_config(**config)))
        for layer in contract.layers(self._env):
            for name in [name for name, part in vars(layer).items() if part is old]:
                setattr(layer, name, self._pool)
        is_bare = self._env is old
        self._env = self._pool if is_bare else self._env
        with _quiet():
            observation, _ = self._env.reset(**({} if is_bare else {"seed": seeds[0]}))
        return self._copied(observation, self.num_envs)

    def _restart(self, ended: np.ndarray) -> spaces.ArrayNest:
        indices = np.flatnonzero(ended)
        observation, *_ = self._env.step(self._taken[indices], indices.astype(np.int32))
        return self._copied(observation, len(indices))

    def _each_info(self, infos: Any, ended: np.ndarray) -> contract.FinalInfo:
        told = super()._each_info(infos, ended)
        for index, info in told.items():
            # Only Atari games, which may lose lives, say in their info whether the game is over.
            self._game_over[index] = info.get("terminated", True)
        return told

    def _actions(self, action: spaces.ArrayNest) -> Any:
        if isinstance(self.action_space, spaces.Discrete):
            # EnvPool's games read outside their arrays for an action that they do not have.
            self._taken = check_actions(action, self.action_space, self.num_envs)
        else:
            self._taken = super()._actions(action)
        return self._taken


def _is_own(env: Any) -> bool:
    """Returns whether it is one of Gymnasium's two vector environments of single ones."""
    names = {cls.__name__ for cls in type(contract.innermost(env)).__mro__}
    return bool(names & {"SyncVectorEnv", "AsyncVectorEnv"})


def _row(batch: Any, index: int) -> Any:
    return batch[index] if isinstance(batch, list) else map_leaves(itemgetter(index), batch)


def _declared_mode(env: Any) -> Any:
    return (contract.attribute_of(env, "metadata") or {}).get("autoreset_mode")


class _OfStableBaselines:
    """A VecEnv of Stable-Baselines3 with the interface of Gymnasium's vector environments."""

    def __init__(self, env: Any) -> None:
        self._env = self.unwrapped = env
        self.num_envs = env.num_envs
        self.single_observation_space = env.observation_space
        self.single_action_space = env.action_space
        self.metadata = {"autoreset_mode": _SAME_STEP}

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self._env.seed(seed)
        return self._env.reset(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, reward, done, infos = self._env.step(action)
        cut = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        last = [info.get("terminal_observation") for info in infos]
        told = {"final_obs": last, "final_info": infos}
        return observation, reward, done & ~np.array(cut), cut, told

    def render(self) -> Any:
        return self._env.get_images()

    def close(self) -> None:
        self._env.close()


def _has_tensors(env: Any) -> bool:
    """Returns whether a vector environment has a torch.device; or its name, as Isaac Lab's, which
    declare no autoreset mode.
    """
    kind = type(contract.attribute_of(env, "device"))
    if kind is str:
        return _declared_mode(env) is None
    return (kind.__module__, kind.__name__) == ("torch", "device")


class _OfTensors:
    """A vector environment of torch tensors, such as ManiSkill's and Isaac Lab's, as one of arrays.

    Every step copies once from its device.
    """

    def __init__(self, env: Any, env_id: str) -> None:
        self._env = env
        self.unwrapped = contract.innermost(env)
        self.metadata = {"autoreset_mode": _SAME_STEP}
        for name in ("num_envs", "single_observation_space", "single_action_space"):
            setattr(self, name, contract.attribute_of(env, name))
        declared = _declared_mode(env) or _SAME_STEP
        if (mode := str(getattr(declared, "value", declared))) != _SAME_STEP:
            raise UsageError(
                f"{env_id} is a vector environment of tensors with the autoreset mode {mode}: use "
                f"{_SAME_STEP}, in which the step that ends an episode starts the next one"
            )

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        return map_leaves(_as_array, self._env.reset(seed=seed)[0]), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        import torch  # the environment has imported it

        device = contract.attribute_of(self._env, "device")
        tensors = map_leaves(lambda leaf: torch.tensor(leaf, device=device), action)
        *results, infos = self._env.step(tensors)
        observation, reward, terminated, truncated = map_leaves(_as_array, tuple(results))
        told: dict[str, Any] = {}
        if (terminated | truncated).any():
            numbers = infos.get("final_info", infos).items()
            is_number = [(key, value) for key, value in numbers if getattr(value, "ndim", 0) == 1]
            told["final_info"] = {key: _as_array(value) for key, value in is_number}
            last = infos.get("final_obs", infos.get("final_observation"))
            told["final_obs"] = last if last is None else map_leaves(_as_array, last)
        return observation, reward, terminated, truncated, told

    def render(self) -> Any:
        return _as_array(self._env.render())

    def close(self) -> None:
        self._env.close()


def _as_array(value: Any) -> Any:
    """Returns an array with the values of a tensor of any device; anything else as it is."""
    return value.numpy(force=True) if hasattr(value, "numpy") else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops Gymnasium's warnings about the float64 bounds of EnvPool's float32 spaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
