# SPDX-License-Identifier: Apache-2.0
"""Learns CartPole with the architectures of docs/explanation/schemes.md, several seeds each.

usage: PYTHONPATH=.:benchmarks python benchmarks/scheme_learning.py RUNS_FOLDER [--seeds 11 12 13]

Trains one run after the other, evaluates each with greedy and with sampled actions, writes a CSV
for each and a curve to docs/results/schemes, and prints the lines of their table. Runs that are
there already are only evaluated. Use seeds that the settings were not tuned on.

With --architectures ppo this is the example of README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from keep_results import write_thinned
from result_figures import RESULTS, draw

from torchbeast import Learner, make_env
from torchbeast.core.algos import IMPALA, LASER, PPO
from torchbeast.core.algos.base import AlgoFactory
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.schemes import Scheme

TARGET = RESULTS / "schemes"


def _a3c() -> AlgoFactory:
    return PPO.create_factory(
        lr=7e-4, max_grad_norm=0.5, reward_scale=0.1, num_epochs=1, num_mini_batch=1
    )


def _of_cartpole(algo: Callable[..., AlgoFactory]) -> Callable[[], AlgoFactory]:
    """Returns IMPALA or LASER with the settings of the preset cartpole."""
    return lambda: algo(lr=2e-3, entropy_coef=0.001, reward_scale=0.1)


class Architecture(NamedTuple):
    """A named architecture: its algorithm, environments of each worker, and how long it learns."""

    algo: Callable[[], AlgoFactory] | None  # None: that of the architecture
    num_envs: int
    steps: int = 100_000
    unroll_length: int | None = None  # of the architecture


ARCHITECTURES = {
    "ppo": Architecture(None, 8),
    "dppo": Architecture(None, 4),
    "dd-ppo": Architecture(None, 4),
    "a3c": Architecture(_a3c, 8, 300_000, 16),
    "impala": Architecture(_of_cartpole(IMPALA.create_factory), 8, 250_000),
    "seed": Architecture(_of_cartpole(IMPALA.create_factory), 8, 250_000),
    "laser": Architecture(_of_cartpole(LASER.create_factory), 8, 250_000),
}


def main() -> None:
    """Trains, evaluates and keeps."""
    arguments = _arguments()
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in arguments.architectures:
        folders = [arguments.runs.expanduser() / f"{name}-{seed}" for seed in arguments.seeds]
        pairs = zip(folders, arguments.seeds, strict=True)
        returns = [learnt(name, folder, seed) for folder, seed in pairs]
        for folder in folders:
            write_thinned(folder, TARGET / f"{folder.name}.csv")
        found = " | ".join(
            ", ".join(f"{each:g}" for each in of_one) for of_one in zip(*returns, strict=True)
        )
        print(f"| `{name}` | {ARCHITECTURES[name].steps:,} | {found} |", flush=True)
    print(draw("schemes/curve"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the runs")
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13])
    return parser.parse_args()


def learnt(name: str, folder: Path, seed: int) -> tuple[float, float]:
    """Returns the mean return of a hundred episodes after training, with greedy actions and with
    sampled ones.
    """
    architecture = ARCHITECTURES[name]
    envs, _, _ = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": "CartPole-v1"}, vec_env_size=architecture.num_envs
    )
    others: dict[str, Any] = {}
    if architecture.algo is not None:
        others["algo_factory"] = architecture.algo()
    if architecture.unroll_length is not None:
        size = architecture.unroll_length
        others["storage_factory"] = OnPolicyGAEBuffer.create_factory(size=size, gae_lambda=0.95)
    scheme = Scheme.preset(name, envs, **others)
    with Learner(scheme, architecture.steps, log_dir=folder, seed=seed) as learner:
        if (folder / "model.tar").exists():
            learner.restore()
        learner.train()
        greedy, sampled = (learner.evaluate(100, sampled=how, seed=1) for how in (False, True))
        return statistics.fmean(greedy.returns), statistics.fmean(sampled.returns)


if __name__ == "__main__":
    main()
