# SPDX-License-Identifier: Apache-2.0
"""The main module of an EnvProcess's child; started by env_process.py, never by a user.

    socket  calls (method, arguments), and answers, the first of which describes it; all pickled
    stdin   the process ends when stdin is closed
    stdout  one line of JSON if an environment fails

The process never imports torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.agents import AgentsEnv
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs import make_environment
from torchbeast.envs.env_process import Outcome, outcome_in
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, what_it_raised
from torchbeast.fleets.child_main import follow_stdin, run

_DESCRIPTION = ("env_id", "observation_space", "action_space", "frame_stack")


def main(arguments: dict[str, Any]) -> int:
    """Answers calls until stdin is closed; returns the exit code."""
    return run(lambda report: _serve(arguments))


def _serve(arguments: dict[str, Any]) -> None:
    connection = Connection(arguments["socket"])
    stopping = socket.socket(fileno=os.dup(connection.fileno()))
    follow_stdin(lambda _: None, lambda: stopping.shutdown(socket.SHUT_RDWR))
    spec = EnvSpec.from_parent(arguments["env"])
    env = make_environment(spec, arguments["num_envs"], arguments["render"])
    served = _Served(env, spec.name)
    with closing(env), suppress(EOFError, OSError):  # of the socket: the parent is done
        described = {name: getattr(env, name) for name in _DESCRIPTION}
        connection.send({**described, "num_agents": getattr(env, "num_agents", 1)})
        while True:
            connection.send(served.answer(*connection.recv()))


class _Served:
    """The methods of EnvProcess on the environment's side."""

    def __init__(self, env: VecEnv, name: str) -> None:
        self._env, self._name = env, name

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Calls a method; raises UsageError, or RunError with the environment's traceback."""
        try:
            return getattr(self, method)(*arguments)
        except (UsageError, RunError):
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"{self._name} failed: {what_it_raised(error)}") from error

    def reset(self, seed: int) -> Any:
        return _arrays(self._env.reset(seed))

    def step(self, action: Any) -> VecStep:
        return VecStep(*_arrays(self._env.step(action)))

    def render(self) -> np.ndarray | None:
        return self._env.render() if isinstance(self._env, SyncVecEnv | AgentsEnv) else None

    def check_goals(self) -> None:
        self.outcome: Outcome = outcome_in(self._env, self._name)


def _arrays(nest: Any) -> Any:
    """Returns plain arrays, so that the parent does not import classes of the environment."""
    return map_leaves(lambda leaf: None if leaf is None else np.asarray(leaf), nest)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
