# SPDX-License-Identifier: Apache-2.0
"""How much policy lag can an algorithm take? Trains five agents on rollouts of older policies.

usage: PYTHONPATH=.:benchmarks python benchmarks/lag.py train RUNS [--seeds 101 102]
       PYTHONPATH=.:benchmarks python benchmarks/lag.py keep RUNS

`train` trains every agent on every game with every lag: batches are collected with weights that are
exactly so many updates old (--fixed_lag). Runs that have ended are skipped, so the same command
continues after an interruption. `keep` adds the results to docs/results/lag/lag.csv, and draws all
that is there.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_figures import RESULTS

from torchbeast import compare, plot
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.storages.rollout import Rollout
from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import read_meta

GAMES = ("breakout", "asterix", "spaceinvaders")
LAGS = (0, 1, 4, 16, 64)
SEEDS = (101, 102, 103, 104, 105)
STEPS = 500_000
AGENTS = {  # preset, and further flags
    "IMPALA": ("impala", ""),
    "IMPALA without correction": ("impala", "--algo lag:Uncorrected"),
    "PPO": ("ppo", ""),
    "PQN": ("pqn", ""),
    "LASER": (
        "impala",
        "--algo laser --replay_size 200000 --replay_ratio 7 --num_envs 8 --batch_size 8"
        " --entropy_cost 0.12",
    ),
}
CSV = RESULTS / "lag" / "lag.csv"


class Uncorrected(IMPALA):
    """IMPALA that takes every rollout for one of the present policy: all ratios are 1."""

    corrects_lag = False

    def losses(self, minibatch: Rollout) -> Losses:
        with torch.no_grad():
            logits = unroll(self.actor, minibatch).policy_logits
        acted = torch.cat([logits[:1], logits[:-1]])  # row t + 1 has the action of row t's policy
        return super().losses(replace(minibatch, extras={"policy_logits": acted}))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["train", "keep"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args()
    every = product(arguments.seeds, GAMES, LAGS, AGENTS)
    if arguments.command == "train":
        for seed, game, lag, agent in every:
            train(arguments.runs, agent, game, lag, seed)
        return
    results = read()
    for seed, game, lag, agent in every:
        folder = arguments.runs / name_of(agent, game, lag, seed)
        if read_meta(folder).get("successful"):
            results[agent, game, lag][seed] = last_return(folder)
    write(results)
    draw(results)


def name_of(agent: str, game: str, lag: int, seed: int) -> str:
    """Returns the name of a run's folder."""
    return f"{agent.replace(' ', '-')}_{game}_{lag}_{seed}"


def train(runs: Path, agent: str, game: str, lag: int, seed: int) -> None:
    """Trains one run, unless it has ended."""
    preset, flags = AGENTS[agent]
    name = name_of(agent, game, lag, seed)
    if read_meta(runs / name).get("successful"):
        return
    command = [sys.executable, "-m", "torchbeast.monobeast", "--savedir", str(runs), "--xpid", name]
    command += ["--preset", f"minatar-{game}-{preset}", "--fixed_lag", str(lag), *flags.split()]
    command += ["--total_steps", str(STEPS), "--seed", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


Results = defaultdict[tuple[str, str, int], dict[int, float]]
"""The return of each seed, by agent, game and lag."""


def last_return(folder: Path) -> float:
    """Returns the mean return of the last 100 training episodes."""
    *_, last = read_logs(folder)
    return last["mean_return"]


def read() -> Results:
    """Returns what is kept."""
    results: Results = defaultdict(dict)
    if CSV.exists():
        for row in csv.DictReader(CSV.read_text().splitlines()):
            key = row["agent"], row["game"], int(row["lag"])
            results[key][int(row["seed"])] = float(row["mean_return"])
    return results


def write(results: Results) -> None:
    """Writes lag.csv."""
    CSV.parent.mkdir(parents=True, exist_ok=True)
    with CSV.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["agent", "game", "lag", "seed", "mean_return"])
        for (agent, game, lag), returns in sorted(results.items()):
            writer.writerows([agent, game, lag, seed, f"{returns[seed]:.4g}"] for seed in returns)


def draw(results: Results) -> None:
    """Draws the returns against the lag, a panel for each game; prints them as a table."""
    with plot.figure_for([CSV.with_suffix(".png")], (3.3 * len(GAMES), 3.2)) as figure:
        for axes, game in zip(figure.subplots(1, len(GAMES)), GAMES, strict=True):
            for number, agent in enumerate(AGENTS):
                draw_line(axes, f"C{number}", agent, game, results)
            axes.set_title(f"MinAtar's {game}", fontsize="medium")
            axes.set_xticks(range(len(LAGS)), LAGS)
            axes.set_xlabel("updates between acting and learning")
        figure.axes[0].set_ylabel("return")
        figure.axes[0].legend(fontsize="x-small")


def draw_line(axes: Any, colour: str, agent: str, game: str, results: Results) -> None:
    """Draws interquartile means with their 95 % intervals; prints a row of the table."""
    lags = [lag for lag in LAGS if results.get((agent, game, lag))]
    scores = [np.array([*results[agent, game, lag].values()]) for lag in lags]
    found = [compare.compared([[of_lag]]).iqm[0] for of_lag in scores]
    places = [LAGS.index(lag) for lag in lags]
    axes.plot(places, [value for value, _, _ in found], "o-", color=colour, label=agent)
    axes.fill_between(
        places, [f[1] for f in found], [f[2] for f in found], color=colour, alpha=0.15, linewidth=0
    )
    cells = [f"{value:.3g} [{low:.3g}, {high:.3g}]" for value, low, high in found]
    print("| " + " | ".join([game, agent, *cells]) + " |")


if __name__ == "__main__":
    main()
