# SPDX-License-Identifier: Apache-2.0
"""Steps/s of environments: the library alone, TorchBeast's on top of it, and the programs.

The first two take random actions, with all cores as threads. The programs train with IMPALA and as
many environments. Everything is interleaved. Atari's games run in ALE's vector environment, names
with envpool: in EnvPool (`pip install '.[envpool]'`). The libraries alone stack four frames of
Atari, which TorchBeast leaves to the learner, and EnvPool's count includes the steps that reset.

python benchmarks/environments.py [--envs ALE/Pong-v5 envpool:CartPole-v1] [--programs polybeast]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from figures import interleaved, print_table, write_json
from progress import add_flags, measured, torchbeast

from torchbeast import envs
from torchbeast.core.envs.spaces import Box
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.atari import rom_name
from torchbeast.envs.spec import is_atari
from torchbeast.fleets.system import available_cores

ENVS = ("ALE/Pong-v5", "envpool:Pong-v5", "envpool:CartPole-v1", "envpool:HalfCheetah-v4")
PROGRAMS = ("monobeast", "polybeast", "raybeast")


def main() -> None:
    arguments = _arguments()
    found = {}
    for name in arguments.envs:
        found[name] = interleaved(_runs(name, arguments), arguments.repeats)
        print(name)
        print_table(found[name], "steps/s")
        write_json(arguments.json, arguments, steps_per_second=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=ENVS, help="Atari games, or envpool: tasks")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument("--threads", type=int, default=available_cores())
    add_flags(parser, seconds=10.0)
    return parser.parse_args()


def _runs(name: str, arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Makes the environments, which is not timed, and returns their runs and the programs'."""
    size, threads = arguments.num_envs, arguments.threads
    library = _ale if is_atari(name) else _envpool
    ours = envs.make(name, size, num_threads=threads)
    ours.reset(0)
    steps = {
        "the library alone": library(name, size, threads),
        "TorchBeast's environment": ours.step,
    }
    actions = _random_actions(ours)
    seconds = arguments.seconds
    runs: dict[str, Callable[[], float]] = {
        side: functools.partial(_steps_per_second, step, actions, seconds)
        for side, step in steps.items()
    }
    model = "shallow" if ours.frame_stack > 1 else "mlp"
    flags = {"env": name, "num_envs": size, "unroll_length": 20, "batch_size": size}
    for program in arguments.programs:
        runs[program] = functools.partial(measured, torchbeast(program, model, flags), arguments)
    return runs


def _random_actions(env: VecEnv) -> np.ndarray:
    """Returns actions of 64 steps, [64, E, ...]."""
    space, rng, shape = env.action_space, np.random.default_rng(0), (64, env.num_envs)
    if isinstance(space, Box):
        return rng.uniform(space.low, space.high, (*shape, *space.shape)).astype(space.dtype)
    return rng.integers(0, space.n, shape).astype(np.int32)  # type: ignore[union-attr]


def _steps_per_second(step: Callable[[Any], object], actions: np.ndarray, seconds: float) -> float:
    step(actions[0])
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step(actions[calls % len(actions)])
        calls += 1
    return calls * actions.shape[1] / (time.perf_counter() - began)


def _ale(name: str, size: int, threads: int) -> Callable[[Any], object]:
    """Returns the step of ALE's environment with TorchBeast's settings, but stacks of frames."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(
        rom_name(name),
        size,
        num_threads=threads,
        autoreset_mode="SameStep",
        life_loss_info=True,
        repeat_action_probability=0.25 if name.startswith("ALE/") else 0.0,
        reward_clipping=False,
    )
    env.reset(seed=np.arange(size))
    return env.step


def _envpool(name: str, size: int, threads: int) -> Callable[[Any], object]:
    import envpool

    task = name.removeprefix("envpool:")
    env = envpool.make(task, env_type="gymnasium", num_envs=size, num_threads=threads)
    env.reset()
    return env.step


if __name__ == "__main__":
    main()
