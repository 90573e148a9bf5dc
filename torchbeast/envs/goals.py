# SPDX-License-Identifier: Apache-2.0
"""Environments with goals: what a step would have brought, had the goal been another.

Such an environment's observation is a dict with `achieved_goal` and `desired_goal`, and it has the
method compute_reward(achieved_goal, desired_goal, info), which takes arrays [N, *shape] of any N,
as those of Gymnasium-Robotics do. If it also has compute_terminated with the same arguments, that
says where an episode would have ended; otherwise nowhere.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvError, EnvSpec
from torchbeast.processes.supervisor import Supervisor

Outcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def outcome_of(spec: EnvSpec, supervisor: Supervisor) -> Outcome:
    """Returns a function of achieved and desired goals [N, *shape] that gives rewards float32 [N]
    and terminated bool [N].

    It asks an environment that is never stepped, in a process that ends with the run. Raises
    UsageError when that has no goals.
    """
    whole = dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, observation_keys=())
    )
    env = EnvProcess(whole, 1, check_goes_on=supervisor.check_goes_on)
    ending = threading.Thread(target=env.close, name="close environment")
    supervisor.on_close(ending.start)  # without waiting for it
    env.check_goals()
    return env.outcome


def outcome_in(env: VecEnv, name: str) -> Outcome:
    """Returns the same for an environment of this name, which may be closed afterwards."""
    task = getattr(env, "task", env)
    rewards = getattr(task, "compute_reward", None)
    if rewards is None:
        raise EnvError(
            f"{name} has no compute_reward(achieved_goal, desired_goal, info), which "
            "hindsight needs: leave out --hindsight_share"
        )
    return _Outcome(name, rewards, getattr(task, "compute_terminated", _never))


@dataclasses.dataclass(frozen=True)
class _Outcome:
    name: str
    rewards: Callable[..., Any]
    terminated: Callable[..., Any]

    def __call__(self, achieved: np.ndarray, desired: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rewards = np.asarray(self.rewards(achieved, desired, {}), np.float32)
        terminated = np.asarray(self.terminated(achieved, desired, {}), bool)
        for method, found in (("compute_reward", rewards), ("compute_terminated", terminated)):
            if found.shape != achieved.shape[:1]:
                raise EnvError(
                    f"{self.name}: {method} returns shape {list(found.shape)} for "
                    f"{len(achieved)} goals, expected [{len(achieved)}]"
                )
        return rewards, terminated


def _never(achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
    return np.zeros(len(achieved), bool)
