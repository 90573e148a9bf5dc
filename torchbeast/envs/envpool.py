# SPDX-License-Identifier: Apache-2.0
"""Environments of EnvPool, in C++: `envpool:Pong-v5`, `envpool:HalfCheetah-v4` (Weng et al. 2022,
arXiv:2206.10558).

A group of environments that are stepped together is one pool. A pool begins an episode one step
late, so an environment that ended is stepped once more within the same step.

Atari games send single frames, which the policy stacks. They have EnvPool's defaults otherwise, for
example full games, up to 30 no-ops at the start, and no sticky actions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np

from torchbeast.core.base.checks import did_you_mean
from torchbeast.core.base.nest import flatten, pack_as
from torchbeast.core.base.specs import import_module
from torchbeast.core.envs.gym_vector import GymVectorEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvError, EnvSpec

PREFIX = "envpool:"
# Arguments of envpool.make that this module gives.
_OURS = ("task_id", "env_type", "num_envs", "batch_size", "num_threads", "seed", "env_seed")


def make(spec: EnvSpec, num_envs: int, num_threads: int) -> VecEnv:
    """Makes a pool.

    spec: its kwargs are options of the task, such as frame_skip. num_threads: of the pool.

    Raises EnvError when EnvPool has no such task or option, or is not installed.
    """
    envpool = _envpool(spec.name)
    task = _task(envpool, spec.name)
    try:
        defaults = envpool.make_spec(task).config._asdict()
    except ImportError as error:  # a library of the system, which the message names
        raise EnvError(f"{spec.name}: {error}") from error
    taken = [name for name in defaults if name not in _OURS]
    for option in spec.kwargs:
        if option not in taken:
            hint = did_you_mean(option, taken) or ";"
            raise EnvError(
                f"{spec.name} takes no {option!r}{hint} it takes {' '.join(sorted(taken))}"
            )
    stacks = "stack_num" in defaults and "stack_num" not in spec.kwargs
    options = {**({"stack_num": 1} if stacks else {}), **spec.kwargs}

    def make_pool(seeds: Sequence[int]) -> Any:
        with _no_warnings():
            return envpool.make(
                task,
                env_type="gymnasium",
                num_envs=num_envs,
                num_threads=num_threads,
                seed=list(seeds),
                **options,
            )

    env = GymVectorEnv(_Pool(make_pool, num_envs), spec.name)
    env.frame_stack = int(defaults["stack_num"]) if stacks else 1
    return env


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hides Gymnasium's warning that it rounds the bounds of EnvPool's spaces to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _envpool(env_id: str) -> Any:
    """Imports EnvPool; raises EnvError unless there is a version 1."""
    if find_spec("envpool") is None:
        raise EnvError(f"{env_id} needs EnvPool: pip install 'torchbeast[envpool]'")
    envpool: Any = import_module("envpool", env_id)
    if not hasattr(envpool, "list_all_envs") or int(envpool.__version__.split(".")[0]) < 1:
        raise EnvError(
            f"{env_id} needs EnvPool 1 or newer, got {envpool.__version__}: "
            "pip install --upgrade envpool"
        )
    return envpool


def _task(envpool: Any, env_id: str) -> str:
    """Returns EnvPool's name of a task, which may have the name of its family in front of it."""
    known = envpool.list_all_envs()
    name = env_id.removeprefix(PREFIX)
    for task in (name, name.rpartition("/")[2]):
        if task in known:
            return task
    raise EnvError(f"{env_id}: EnvPool has no task {name!r}{did_you_mean(name, known)}")


class _Pool:
    """A pool with the interface of Gymnasium's vector environments, of autoreset mode DISABLED.

    A pool gets its seeds when it is made, so a reset with seeds makes another.
    """

    has_seeds = True

    def __init__(self, make_pool: Callable[[Sequence[int]], Any], num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": "Disabled"}
        self.unwrapped = self
        self._make_pool = make_pool
        self._pool = make_pool(range(num_envs))
        with _no_warnings():
            self.single_observation_space = self._pool.single_observation_space
            self.single_action_space = self._pool.single_action_space
        self._newest: Any = None  # observations [E, ...]

    def reset(
        self, *, seed: Sequence[int] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._make_pool(seed)
            with _no_warnings():
                self._newest, _ = self._pool.reset()
        else:
            assert options is not None
            begun, info = self._pool.reset(options=options)
            for rows, first in zip(flatten(self._newest), flatten(begun), strict=True):
                rows[info["env_id"]] = first
        return self._newest, {}

    def step(self, action: Any) -> tuple[Any, ...]:
        observation, *results, info = self._pool.step(action)
        self._newest = pack_as(observation, [np.array(leaf) for leaf in flatten(observation)])
        of_all = {
            key: value for key, value in info.items() if np.shape(value)[:1] == (self.num_envs,)
        }
        given = np.ones(self.num_envs, bool)
        return observation, *results, of_all | {f"_{key}": given for key in of_all}

    def close(self) -> None:
        self._pool.close()
