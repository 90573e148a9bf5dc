# SPDX-License-Identifier: Apache-2.0
"""Compares steps/s of PPO by the number of workers that collect, and of those with gradients.

All runs have the same environments and batches, which the workers share. In each round every run
takes place once, so that a disturbance affects them alike. With the default settings everything
takes 25 minutes.

python benchmarks/scheme_speed.py [--envs cartpole] [--seconds 20] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figures, interleaved, print_table, write_json

from torchbeast import Learner, make_env
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.algos import PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.schemes import Scheme

NEVER = 10**9  # steps: no run gets there


class Task(NamedTuple):
    """An environment, with the sizes of its preset of PPO."""

    env: str
    network: str
    num_envs: int
    unroll_length: int
    algorithm: dict[str, Any]


TASKS = {
    "cartpole": Task(
        "CartPole-v1", "mlp", 8, 128, {"lr": 1e-3, "max_grad_norm": 0.5, "reward_scale": 0.1}
    ),
    "minatar-breakout": Task(
        "MinAtar/Breakout-v1", "auto", 32, 64, {"lr": 1e-3, "max_grad_norm": 0.5}
    ),
}
RUNS: dict[str, dict[str, Any]] = {
    "one process": {},
    **{
        f"{workers} collecting, {how}": {"col_remote_workers": workers, "col_communication": how}
        for how in ("synchronous", "asynchronous")
        for workers in (1, 2, 4)
    },
    **{f"{workers} with gradients": {"grad_remote_workers": workers} for workers in (1, 2)},
}


def main() -> None:
    arguments = _arguments()
    found: dict[str, Figures] = {}
    for name in arguments.envs:
        runs = {
            run: functools.partial(steps_per_second, scheme(TASKS[name], **axes), arguments)
            for run, axes in RUNS.items()
        }
        found[name] = interleaved(runs, arguments.repeats)
        print(f"{TASKS[name].env}, {TASKS[name].num_envs} environments")
        print_table(found[name], "steps/s")
        write_json(arguments.json, arguments, steps_per_second=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--warm_up", type=float, default=3.0, help="seconds after the first update")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds")
    parser.add_argument("--json", type=Path, help="also write machine, settings and figures")
    return parser.parse_args()


def scheme(task: Task, **axes: Any) -> Scheme:
    """Returns PPO whose workers share the environments of the task, and each batch."""
    learners = max(1, axes.get("grad_remote_workers", 0))
    of_worker = task.num_envs // (learners * max(1, axes.get("col_remote_workers", 0)))
    envs, action_space, obs_space = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": task.env}, vec_env_size=of_worker
    )
    return Scheme(
        train_envs_factory=envs,
        actor_factory=OnPolicyActorCritic.create_factory(obs_space, action_space, task.network),
        algo_factory=PPO.create_factory(**task.algorithm),
        storage_factory=OnPolicyGAEBuffer.create_factory(
            size=task.unroll_length, batch_size=task.num_envs // learners
        ),
        **axes,
    )


def steps_per_second(made: Scheme, arguments: argparse.Namespace) -> float:
    """Returns the steps that a new run learns from in a second."""
    with (
        tempfile.TemporaryDirectory(prefix="torchbeast-compared-") as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Learner(made, NEVER, Path(folder) / "run", seed=1) as learner,
    ):
        learner.step()
        _learn(learner, arguments.warm_up)
        return _learn(learner, arguments.seconds)


def _learn(learner: Learner, seconds: float) -> float:
    """Learns for so long, in whole updates; returns the steps of a second."""
    began, first = time.perf_counter(), learner.steps
    while time.perf_counter() - began < seconds:
        learner.step()
    return (learner.steps - first) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
