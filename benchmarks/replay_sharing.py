# SPDX-License-Identifier: Apache-2.0
"""Compares agents that share a replay, with and without the trust region, with agents that do not.

usage: PYTHONPATH=.:benchmarks python benchmarks/replay_sharing.py train RUNS_FOLDER
       PYTHONPATH=.:benchmarks python benchmarks/replay_sharing.py keep RUNS_FOLDER

The agents differ in how much their entropy is rewarded, from nearly sure of their actions to nearly
random, so that most of a shared replay comes from policies that are far away. `train` runs a sweep
for each variant and seed and skips those that are complete; `keep` writes a CSV of all agents to
docs/results/replay and prints its table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from keep_results import with_counts
from replay_learning import return_at
from result_figures import RESULTS

from torchbeast.reporting.log_files import read_logs

ENTROPY_COSTS = (0.06, 0.12, 0.5, 1.5)
SHARED = ("--shared_replay",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "own": (),
    "shared": SHARED,
    "shared-all": (*SHARED, "--replay_kl_threshold", "inf"),
}


def main() -> None:
    """Trains or keeps."""
    arguments = _arguments()
    arguments.runs = arguments.runs.expanduser()
    if arguments.task == "train":
        for seed in arguments.seeds:
            for variant in VARIANTS:
                train(variant, seed, arguments)
    else:
        keep(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("train", "keep"))
    parser.add_argument("runs", type=Path, help="the folder of the sweeps")
    parser.add_argument("--game", default="Breakout", help="a game of MinAtar")
    parser.add_argument("--steps", type=int, default=100_000, help="env steps of each agent")
    parser.add_argument("--seeds", nargs="+", type=int, default=[61, 62, 63])
    return parser.parse_args()


def _name(game: str, variant: str, seed: int) -> str:
    return f"sharing-{game.lower()}-{variant}-{seed}"


def train(variant: str, seed: int, arguments: argparse.Namespace) -> None:
    """Runs one sweep of four agents, all at the same time, and prints its ranking."""
    costs = ",".join(map(str, ENTROPY_COSTS))
    place = ["--savedir", str(arguments.runs), "--name", _name(arguments.game, variant, seed)]
    agents = ["--set", f"entropy_cost={costs}", "--parallel", str(len(ENTROPY_COSTS))]
    size = arguments.steps if variant == "own" else arguments.steps * len(ENTROPY_COSTS)
    flags = [
        *("--preset", "minatar-breakout", "--env", f"MinAtar/{arguments.game}-v1"),
        *("--num_envs", "16", "--seed", str(seed), "--total_steps", str(arguments.steps)),
        *("--replay_size", str(size), "--replay_ratio", "7", "--batch_size", "8"),
        *VARIANTS[variant],
    ]
    command = [sys.executable, "-m", "torchbeast.sweep", *place, *agents, *flags]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    print(_name(arguments.game, variant, seed), _returns(arguments, variant, seed), flush=True)


def _returns(arguments: argparse.Namespace, variant: str, seed: int) -> list[float]:
    """Returns each agent's mean return over the last tenth of its steps."""
    sweep = arguments.runs / _name(arguments.game, variant, seed)
    folders = [sweep / f"entropy_cost={cost}" for cost in ENTROPY_COSTS]
    found = [return_at(with_counts(read_logs(folder)), arguments.steps) for folder in folders]
    return [round(value, 2) for value in found if value is not None]


def keep(arguments: argparse.Namespace) -> None:
    """Writes all returns as a CSV and prints the table."""
    returns = {
        (variant, seed): _returns(arguments, variant, seed)
        for variant in VARIANTS
        for seed in arguments.seeds
    }
    with open(RESULTS / "replay" / "sharing.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("variant", "seed", *(f"entropy_cost={cost}" for cost in ENTROPY_COSTS)))
        writer.writerows((*key, *values) for key, values in returns.items())
    print("\n".join(_table(arguments, returns)))


def _table(
    arguments: argparse.Namespace, returns: dict[tuple[str, int], list[float]]
) -> Iterator[str]:
    """Yields the lines of the table: the median over seeds, and each seed's figure."""
    yield f"| {arguments.game} | " + " | ".join(map(str, ENTROPY_COSTS)) + " |"
    yield "| --- |" + " --- |" * len(ENTROPY_COSTS)
    for variant in VARIANTS:
        columns = zip(*(returns[variant, seed] for seed in arguments.seeds), strict=True)
        yield f"| {variant} | " + " | ".join(_cell(values) for values in columns) + " |"


def _cell(values: tuple[float, ...]) -> str:
    return f"**{statistics.median(values):.2f}** ({', '.join(f'{value:.2f}' for value in values)})"


if __name__ == "__main__":
    main()
