# SPDX-License-Identifier: Apache-2.0
"""The worker in an EnvProcess's child process, which imports torch only for self-play."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.contract import VecStep, picture_of
from torchbeast.envs import make_environment
from torchbeast.envs.env_process import Outcome, outcome_in
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import running_users_code
from torchbeast.fleets.fleet import FleetWorker

_DESCRIPTION = ("env_id", "observation_space", "action_space", "frame_stack")


class EnvWorker(FleetWorker):
    """The methods of EnvProcess on the environment's side."""

    _env_name = "environment"

    def start(self, spec: EnvSpec, num_envs: int, render: bool) -> dict[str, Any]:
        """Makes the environments and describes them."""
        self._env_name = spec.name
        self._env = self._closing.enter_context(closing(make_environment(spec, num_envs, render)))
        with running_users_code(f"{spec.name} failed"):
            described = {name: getattr(self._env, name) for name in _DESCRIPTION}
            return {**described, "num_agents": getattr(self._env, "num_agents", 1)}

    def answer(self, method: str, *arguments: Any) -> Any:
        """Calls a method; raises UsageError, or RunError with the environment's traceback."""
        with running_users_code(f"{self._env_name} failed"):
            return getattr(self, method)(*arguments)

    def reset(self, seed: int) -> Any:
        return _arrays(self._env.reset(seed))

    def step(self, action: Any) -> VecStep:
        return VecStep(*_arrays(self._env.step(action)))

    def render(self) -> np.ndarray | None:
        return picture_of(self._env)

    def check_goals(self) -> None:
        self.outcome: Outcome = outcome_in(self._env, self._env_name)

    def end(self) -> None:
        """Does nothing: a call ends by itself, or with the process."""


def _arrays(nest: Any) -> Any:
    """Returns plain arrays, so that the parent does not import classes of the environment."""
    return map_leaves(lambda leaf: None if leaf is None else np.asarray(leaf), nest)
