# SPDX-License-Identifier: Apache-2.0
"""Measures Atari environments alone, with random actions: an upper bound of every program.

It compares ALE's vector environment, TorchBeast's on top of it and, with --envpool_python, EnvPool,
each with one thread and with all cores, interleaved. EnvPool has a virtual environment of its own,
because its dependencies differ: python -m venv /tmp/envpool && /tmp/envpool/bin/pip install envpool

python benchmarks/environments.py [--envpool_python /tmp/envpool/bin/python] [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from figures import interleaved, print_table, write_json
from stepping import Step, steps_per_second

from torchbeast import envs
from torchbeast.core.envs.spaces import Discrete
from torchbeast.envs.atari import rom_name
from torchbeast.fleets.system import available_cores

SERVER = Path(__file__).with_name("envpool_server.py")


def main() -> None:
    arguments = _arguments()
    with ExitStack() as servers:
        runs = {
            f"{name}, threads: {threads}": run
            for threads in sorted({1, arguments.threads})
            for name, run in _runs(arguments, threads, servers).items()
        }
        figures = interleaved(runs, arguments.repeats)
    print_table(figures, "agent steps/s")
    write_json(arguments.json, arguments, steps_per_second=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="compared with one thread"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--envpool_python", help="path of a Python with EnvPool")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def _runs(
    arguments: argparse.Namespace, threads: int, servers: ExitStack
) -> dict[str, Callable[[], float]]:
    """Makes the environments, which is not timed, and returns their runs."""
    ours = envs.make(arguments.env, arguments.num_envs, num_threads=threads)
    ours.reset(0)
    steps: dict[str, Step] = {"ALE": _bare_ale(arguments, threads), "TorchBeast": ours.step}
    assert isinstance(ours.action_space, Discrete)
    shape = arguments.num_envs, ours.action_space.n, arguments.seconds
    runs: dict[str, Callable[[], float]] = {
        name: functools.partial(steps_per_second, step, *shape) for name, step in steps.items()
    }
    if arguments.envpool_python:
        server = servers.enter_context(_envpool_server(arguments, threads))
        runs["EnvPool"] = functools.partial(_ask, server, arguments.seconds)
    return runs


def _bare_ale(arguments: argparse.Namespace, threads: int) -> Step:
    """Returns the step of ALE's environment with TorchBeast's settings, but stacks of four frames.

    TorchBeast leaves stacking to the learner.
    """
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(
        rom_name(arguments.env),
        arguments.num_envs,
        num_threads=threads,
        autoreset_mode="SameStep",
        life_loss_info=True,
        reward_clipping=False,
    )
    env.reset(seed=np.arange(arguments.num_envs))
    return env.step


@contextmanager
def _envpool_server(arguments: argparse.Namespace, threads: int) -> Iterator[subprocess.Popen[str]]:
    game = rom_name(arguments.env).title().replace("_", "")
    command = [arguments.envpool_python, str(SERVER), f"{game}-v5"]
    command += [str(arguments.num_envs), str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        if _line(server) != "ready":
            sys.exit(f"EnvPool did not start, see above: {' '.join(command)}")
        yield server
        assert server.stdin is not None
        server.stdin.close()  # the server ends at the end of its input


def _ask(server: subprocess.Popen[str], seconds: float) -> float:
    assert server.stdin is not None
    print(seconds, file=server.stdin, flush=True)
    answer = _line(server)
    if not answer:
        sys.exit("EnvPool ended, see above")
    return float(answer)


def _line(server: subprocess.Popen[str]) -> str:
    """Reads a line; returns "" when the server has ended."""
    assert server.stdout is not None
    return server.stdout.readline().strip()


if __name__ == "__main__":
    main()
