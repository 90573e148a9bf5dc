# SPDX-License-Identifier: Apache-2.0
"""The vector environment: E environments that are stepped together.

Environment servers and MonoBeast step nothing else. An environment whose episode ended is reset
within the same step, so the next action is always chosen from `VecStep.observation`:

    observation = env.reset(seed)                   leaves [E, ...]
    while True:
        step = env.step(policy(observation))        action leaves [E, ...]
        observation = step.observation              of the next episode where one ended

E is the number of environments and K the number of those truncated in one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torchbeast.core.base.checks import at_least
from torchbeast.core.envs.contract import VecStep, check_keywords, check_vec_env, is_vector, pool_in
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.selection import check_keys, select
from torchbeast.core.envs.spaces import ActionSpace, ArrayNest, ObservationSpace
from torchbeast.core.envs.sync_vec_env import SyncVecEnv, accepts
from torchbeast.errors import UsageError, expanded


class _WithFactory(type(Protocol)):  # type: ignore[misc]
    """Gives VecEnv its create_factory.

    A class method of VecEnv itself would belong to the protocol: every environment would need one.
    """

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), "create_factory"]  # for completion

    def create_factory(
        cls,
        *,
        env_fn: Callable[..., Any],
        env_kwargs: Mapping[str, Any] = MappingProxyType({}),
        vec_env_size: int = 1,
        log_dir: str | Path | None = None,
        info_keywords: Sequence[str] = (),
    ) -> tuple[VecEnvFactory, ActionSpace, ObservationSpace]:
        """Returns a factory of environments, and their action and observation spaces.

        It makes one environment to find the spaces, and closes it. Observations are as the policy
        sees them, with frames stacked.

        Args:
            env_fn: A function that returns one environment with Gymnasium's interface, or, if it
                has a parameter num_envs, that many as a VecEnv. Lambdas and functions of a notebook
                need cloudpickle to reach other processes.
            env_kwargs: Keyword arguments of env_fn, as JSON has them, because runs record them; put
                anything else into env_fn.
            vec_env_size: Number of environments of a worker, which are stepped together.
            log_dir: Folder of the run's logs, unless the Learner is given one.
            info_keywords: Names of numbers in the info of a game's last step. Their means over
                games are logged as info_NAME.

        Returns:
            The `train_envs_factory` of a Scheme, the action space, and the observation space.

        Raises:
            TypeError: If env_fn is not a function, or does not take env_kwargs.
            ValueError: If vec_env_size is below 1, or info_keywords are given but the environment
                does not give an info.
            UsageError: If env_fn returns something that is not an environment.

        Example:
            ```python
            envs, action_space, obs_space = VecEnv.create_factory(
                env_fn=make_env, env_kwargs={"env": "CartPole-v1"}, vec_env_size=8
            )
            ```
        """
        check_keywords(info_keywords)
        with closing(vec_env_of(env_fn, env_kwargs, 1, _name_of(env_fn))) as env:
            check_gives_info(env, info_keywords)
            factory = VecEnvFactory(
                env_fn=env_fn,
                env_kwargs=dict(env_kwargs),
                vec_env_size=vec_env_size,
                log_dir=None if log_dir is None else expanded(log_dir),
                info_keywords=tuple(info_keywords),
                action_space=env.action_space,
                single_frame_space=env.observation_space,
                frame_stack=env.frame_stack,
                num_agents=getattr(env, "num_agents", 1),
            )
        return factory, factory.action_space, factory.observation_space


class VecEnv(Protocol, metaclass=_WithFactory):
    """Vector environment: E environments that are stepped together.

    `VecEnv.create_factory` describes environments for a Scheme. The caller owns every array that
    reset() and step() return: no later call writes to it.

    Environments with an info have the attribute `final_info` too, see `contract.FinalInfo`: the
    info of the games that ended in the last step(). Environments that are the agents of games have
    `num_agents`, the number of agents of a game; num_envs is then best a multiple of it.
    Environments that take options have a method `set_options(options)`, see
    `SyncVecEnv.set_options`.
    """

    @property
    def num_envs(self) -> int:
        """The number of environments, E."""

    @property
    def env_id(self) -> str:
        """The name by which users select the environment."""

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one environment's observations as sent: no E dimension, no frame stack."""

    @property
    def action_space(self) -> ActionSpace:
        """Space of one environment's actions, without the E dimension."""

    @property
    def frame_stack(self) -> int:
        """Number of newest observations that the policy sees, concatenated along the first
        dimension.

        1: the observation unchanged. See `frame_stack.FrameStacker`.
        """

    def reset(self, seed: int) -> ArrayNest:
        """Starts an episode in every environment.

        Args:
            seed: 0 to 2**31 - 1; environment e is seeded by (seed, e).

        Returns:
            The observations, leaves [E, ...].
        """

    def step(self, action: ArrayNest) -> VecStep:
        """Executes one action per environment; an environment whose episode ended is reset.

        Args:
            action: Leaves [E, ...]; those of a Box may lie outside its bounds.
        """

    def close(self) -> None:
        """Frees the environments' resources. No method may be called afterwards."""


@dataclass(frozen=True, kw_only=True)
class VecEnvFactory:
    """Makes the environments of a worker; see VecEnv.create_factory.

    Attributes:
        env_fn: The function that makes them.
        env_kwargs: Its keyword arguments.
        vec_env_size: Number of environments of a worker.
        log_dir: Folder of the run's logs.
        info_keywords: Numbers to log.
        action_space: Space of one environment's actions.
        single_frame_space: Space of one environment's observations, without stacks.
        frame_stack: Number of frames in a stack.
        num_agents: Number of agents of a game, each of which counts as an environment.
    """

    env_fn: Callable[..., Any]
    env_kwargs: Mapping[str, Any]
    vec_env_size: int
    log_dir: Path | None
    info_keywords: tuple[str, ...]
    action_space: ActionSpace
    single_frame_space: ObservationSpace
    frame_stack: int
    num_agents: int = 1

    def __post_init__(self) -> None:
        at_least(1, vec_env_size=self.vec_env_size)

    def __repr__(self) -> str:
        made = f"env_fn={_name_of(self.env_fn)}, env_kwargs={dict(self.env_kwargs)}"
        return f"VecEnv.create_factory({made}, vec_env_size={self.vec_env_size})"

    @property
    def observation_space(self) -> ObservationSpace:
        """Space of one environment's observations as the policy sees them."""
        return stacked_space(self.single_frame_space, self.frame_stack)

    def __call__(self) -> VecEnv:
        """Makes vec_env_size environments."""
        return self.make(self.vec_env_size)

    def make(self, num_envs: int) -> VecEnv:
        """Makes num_envs environments."""
        return vec_env_of(self.env_fn, self.env_kwargs, num_envs, _name_of(self.env_fn))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def vec_env_of(
    env_fn: Callable[..., Any],
    env_kwargs: Mapping[str, Any],
    num_envs: int,
    env_id: str,
    observation_keys: Sequence[str] = (),
) -> VecEnv:
    """Makes environments by a function that returns one of them, or, if it has a parameter
    num_envs, a VecEnv or a vector environment of Gymnasium or Stable-Baselines3, as
    gymnasium.make_vec does.

    Args:
        env_fn: The function.
        env_kwargs: Its keyword arguments.
        num_envs: Number of environments.
        env_id: Names the environments, unless they come as a VecEnv.
        observation_keys: See SyncVecEnv.

    Raises:
        UsageError: If the function returns something else, or another number of environments.
    """
    from torchbeast.core.envs.agents import AgentsEnv, has_agents

    if not accepts(env_fn, "num_envs"):
        make_one = functools.partial(env_fn, **env_kwargs)
        first = make_one()
        if has_agents(first):
            return AgentsEnv(first, make_one, num_envs, env_id)
        others: list[Callable[[], Any]] = [make_one] * (num_envs - 1)
        return SyncVecEnv([lambda: first, *others], env_id, observation_keys)
    env: VecEnv = env_fn(num_envs=num_envs, **env_kwargs)
    check_vec_env(env, num_envs, env_id)
    return adopted(env, env_id, observation_keys) if is_vector(env) else env


def adopted(env: Any, env_id: str, observation_keys: Sequence[str] = ()) -> VecEnv:
    """Returns the VecEnv of a vector environment of Gymnasium, EnvPool or Stable-Baselines3, or of
    tensors, which is closed where that fails.

    observation_keys: see SyncVecEnv; a pool shows all entries, which are numbers.
    """
    from torchbeast.core.envs.gym_vector import EnvPoolEnv, GymVectorEnv, with_gym_interface

    try:
        theirs = with_gym_interface(env, env_id)
        if pool_in(env) is not None:
            return EnvPoolEnv(theirs, env_id)
        return GymVectorEnv(theirs, env_id, observation_keys)
    except Exception:
        env.close()
        raise


def check_gives_info(env: VecEnv, keywords: Sequence[str]) -> None:
    """Raises UsageError when keywords are given and the environments have no info."""
    if keywords and not hasattr(env, "final_info"):
        raise UsageError(
            f"info_keywords {' '.join(keywords)} are read from the info of an episode's last step, "
            f"but {env.env_id} has no info: remove them, or add an attribute final_info to your "
            "own VecEnv"
        )


class SelectedVecEnv:
    """A VecEnv that shows only the selected entries of its observations."""

    def __init__(self, env: VecEnv, keys: Sequence[str]) -> None:
        """Raises UsageError when a key names no entry; keys: at least one."""
        check_keys(env.observation_space, keys, env.env_id)
        self._env, self._keys = env, tuple(keys)
        self.observation_space: ObservationSpace = select(env.observation_space, keys)

    def __repr__(self) -> str:
        return f"{self._env!r}, only {' '.join(self._keys)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_env"], name)

    def reset(self, seed: int) -> ArrayNest:
        return select(self._env.reset(seed), self._keys)

    def step(self, action: ArrayNest) -> VecStep:
        step = self._env.step(action)
        return step._replace(
            observation=select(step.observation, self._keys),
            final_observation=select(step.final_observation, self._keys),
        )
