# SPDX-License-Identifier: Apache-2.0
"""Measures what policy lag costs: trains five agents on rollouts of older policies.

usage: PYTHONPATH=.:benchmarks python benchmarks/lag.py train RUNS [--seeds 101 102]
       PYTHONPATH=.:benchmarks python benchmarks/lag.py keep RUNS

`train` trains every agent on every game with every lag. The lag is given in environment steps,
because an update of PPO or PQN has 2,048 steps, one of IMPALA 640 and one of LASER 160 new ones. So
all agents learn from policies of the same age, to 6 %, except for LASER's replayed rollouts. Runs
that have ended are skipped, so the same command continues after an interruption. `keep` adds the
mean returns of 100 greedy episodes after training to docs/results/lag/lag.csv, and draws all that
is there.

PQN's epsilon is published with the weights, so that it, too, is as old as they are.
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
from typing import Any, NamedTuple

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

GAMES = {"breakout": "Breakout", "asterix": "Asterix", "spaceinvaders": "Space Invaders"}
LAGS = (0, 2_048, 10_240, 40_960)  # environment steps between acting and learning
SEEDS = (101, 102, 103, 104, 105)
STEPS = 500_000


class Agent(NamedTuple):
    """The settings of an agent: its preset, environment steps per update, and further flags."""

    preset: str
    steps_per_update: int
    flags: str = ""


AGENTS = {
    "IMPALA": Agent("impala", 640),
    "IMPALA without correction": Agent("impala", 640, "--algo lag:Uncorrected"),
    "PPO": Agent("ppo", 2048),
    "PQN": Agent("pqn", 2048),
    "LASER": Agent(
        "impala",
        160,
        "--algo laser --replay_size 200000 --replay_ratio 3 --num_envs 8 --batch_size 8"
        " --entropy_cost 0.06",
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
            results[agent, game, lag][seed] = greedy_return(folder)
    write(results)
    draw(results)


def name_of(agent: str, game: str, lag: int, seed: int) -> str:
    """Returns the name of a run's folder."""
    return f"{agent.replace(' ', '-')}_{game}_{lag}_{seed}"


def train(runs: Path, agent: str, game: str, lag: int, seed: int) -> None:
    """Trains one run, unless it has ended."""
    preset, steps_per_update, flags = AGENTS[agent]
    name = name_of(agent, game, lag, seed)
    if read_meta(runs / name).get("successful"):
        return
    command = [sys.executable, "-m", "torchbeast.monobeast", "--savedir", str(runs), "--xpid", name]
    command += ["--preset", f"minatar-{game}-{preset}", *flags.split(), "--seed", str(seed)]
    command += ["--fixed_lag", str(round(lag / steps_per_update))]
    command += ["--total_steps", str(STEPS), "--eval_every", str(STEPS)]
    command += ["--eval_episodes", "100"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


Results = defaultdict[tuple[str, str, int], dict[int, float]]
"""The return of each seed, by agent, game and lag."""


def greedy_return(folder: Path) -> float:
    """Returns the mean return of the evaluation after training."""
    *_, last = read_logs(folder / "evaluations.csv")
    return last["mean_episode_return"]


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
        print("| game | agent | " + " | ".join(f"{lag:,}" for lag in LAGS) + " |")
        print("| --- | --- |" + " --- |" * len(LAGS))
        for axes, game in zip(figure.subplots(1, len(GAMES)), GAMES, strict=True):
            for number, agent in enumerate(AGENTS):
                draw_line(axes, f"C{number}", agent, game, results)
            axes.set_title(GAMES[game], fontsize="medium")
            axes.set_xticks(range(len(LAGS)), [f"{lag:,}" for lag in LAGS])
            axes.set_xlabel("steps between acting and learning")
        figure.axes[0].set_ylabel("return")
        figure.axes[0].legend(fontsize="x-small")


def draw_line(axes: Any, colour: str, agent: str, game: str, results: Results) -> None:
    """Draws interquartile means with their 95 % intervals; prints a row of the table."""
    found = {}
    for place, lag in enumerate(LAGS):
        if returns := results.get((agent, game, lag)):
            found[place] = compare.compared([[np.array([*returns.values()])]]).iqm[0]
    axes.plot([*found], [value for value, _, _ in found.values()], "o-", color=colour, label=agent)
    low, high = ([interval[end] for interval in found.values()] for end in (1, 2))
    axes.fill_between([*found], low, high, color=colour, alpha=0.15, linewidth=0)
    cells = [
        "{:.3g} [{:.3g}, {:.3g}]".format(*found[place]) if place in found else ""
        for place in range(len(LAGS))
    ]
    print("| " + " | ".join([GAMES[game], agent, *cells]) + " |")


if __name__ == "__main__":
    main()
