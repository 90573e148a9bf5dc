# SPDX-License-Identifier: Apache-2.0
"""The main of a process that steps environments; started by environment.py, never by a user.

Each line of stdin requests a measurement, which is reported on stdout. The process ends when stdin
is closed.
"""

from __future__ import annotations

import functools
import itertools
import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.sample import in_threads
from torchbeast.core.envs.spaces import random_action
from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.child_process import SendReport, follow_stdin, run_child
from torchbeast.fleets.supervisor import Supervisor

_WARM_UP_S = 0.1
_ACTIONS = 1000  # random actions, drawn in advance


def main(arguments: dict[str, Any]) -> int:
    """Steps the environments of `arguments["env"]`; returns the exit code."""
    return run_child(functools.partial(_measure, arguments))


def _measure(arguments: dict[str, Any], report: SendReport) -> None:
    supervisor = Supervisor()
    commands: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    def end() -> None:
        supervisor.stop("stdin is closed")
        commands.put(None)

    follow_stdin(lambda line: commands.put(json.loads(line)["seconds"]), end)
    streams = [_stream(arguments, index) for index in range(arguments["num_streams"])]
    in_threads(streams, _WARM_UP_S, supervisor)
    report({"ready": True})
    while (seconds := commands.get()) is not None:
        report(in_threads(streams, seconds, supervisor)._asdict())


def _stream(arguments: dict[str, Any], index: int) -> Callable[[], int]:
    """Returns a function that steps one group of environments once."""
    spec = EnvSpec.from_parent(arguments["env"])
    env = make_environment(spec, arguments["envs_per_stream"])
    seed = arguments["seed"] * arguments["num_streams"] + index
    rng = np.random.default_rng(seed)
    env.reset(seed)
    actions = [random_action(env.action_space, env.num_envs, rng) for _ in range(_ACTIONS)]
    next_actions = itertools.cycle(actions)

    def step() -> int:
        env.step(next(next_actions))
        return env.num_envs

    return step


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
