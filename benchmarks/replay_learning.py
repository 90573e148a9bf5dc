# SPDX-License-Identifier: Apache-2.0
"""Compares learning with and without replay, in two games of MinAtar with several seeds each.

usage: PYTHONPATH=.:benchmarks python benchmarks/replay_learning.py train RUNS_FOLDER
       PYTHONPATH=.:benchmarks python benchmarks/replay_learning.py keep RUNS_FOLDER

`train` trains every variant of `VARIANTS` with MonoBeast, one run after the other, and skips runs
that are complete, so that the same command continues after an interruption. `keep` writes a CSV for
each run that exists to docs/results/replay, then a curve and a table per game of all runs kept
there. Use seeds that the settings were not tuned on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from keep_results import Row, write_thinned
from result_figures import RESULTS, draw

from torchbeast.reporting.log_files import read_logs

GAMES = ("Breakout", "SpaceInvaders")
STEPS = 1_000_000
HALF = STEPS // 2
MILESTONES = (100_000, 200_000, 300_000, 400_000, 500_000, 750_000, 1_000_000)
BATCHES = {1: 32, 2: 20, 4: 12, 7: 8}  # new rollouts by ratio; a whole batch has 60 or 64
ENTROPY_COST = 0.015  # for each state that is learnt from, where there is a replay

Flags = tuple[str, ...]


class Run(NamedTuple):
    """One run of one variant."""

    game: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.game.lower()}-{self.variant}-{self.seed}"


def _ratio(ratio: int) -> Flags:
    """Returns the flags of a replay: batches are as large with every ratio.

    The entropy bonus counts over new rollouts only, beside a loss over all: so its cost is
    multiplied.
    """
    return (
        *("--total_steps", str(HALF), "--replay_size", "200000", "--replay_ratio", str(ratio)),
        *("--batch_size", str(BATCHES[ratio]), "--entropy_cost", f"{(1 + ratio) * ENTROPY_COST:g}"),
    )


VARIANTS: dict[str, Flags] = {
    "no-replay": ("--total_steps", str(STEPS)),
    "no-replay-8": ("--total_steps", str(STEPS), "--batch_size", str(BATCHES[7])),
    **{f"ratio-{ratio}": _ratio(ratio) for ratio in BATCHES},
    "replay-alone": (
        *_ratio(7),
        *("--replay_size", str(HALF), "--entropy_cost", str(ENTROPY_COST)),
        *("--algo", "replay_alone:ReplayAlone", "--learn_start", "20000"),
    ),
}


def main() -> None:
    """Trains or keeps."""
    arguments = _arguments()
    runs = arguments.runs.expanduser()
    planned = [
        Run(game, variant, seed)
        for seed in arguments.seeds
        for game in GAMES
        for variant in arguments.variants
    ]
    if arguments.task == "train":
        for run in planned:
            train(run, runs)
        return
    for game in GAMES:
        keep([run for run in planned if run.game == game], runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("train", "keep"))
    parser.add_argument("runs", type=Path, help="the folder of the runs")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[61, 62, 63])
    return parser.parse_args()


_SUMMARY = ("Trained for", "Mean return")


def train(run: Run, runs: Path) -> None:
    """Trains one run and prints its summary; a complete run says so."""
    flags = ["--preset", "minatar-breakout", "--env", f"MinAtar/{run.game}-v1"]
    place = ["--savedir", str(runs), "--xpid", run.name, "--seed", str(run.seed)]
    command = [sys.executable, "-m", "torchbeast.monobeast", *flags, *VARIANTS[run.variant], *place]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(_SUMMARY)]
    print(run.name, *said, flush=True)


def keep(planned: list[Run], runs: Path) -> None:
    """Keeps the runs of one game that are here, and prints its table of all that are kept."""
    target = RESULTS / "replay" / planned[0].game.lower()
    target.mkdir(parents=True, exist_ok=True)
    for run in planned:
        if (runs / run.name).exists():
            write_thinned(runs / run.name, _kept(run))
    found = [run for run in planned if _kept(run).exists()]
    print(draw(f"replay/{target.name}/curve"))
    print("\n".join(_table(found)))


def _kept(run: Run) -> Path:
    return RESULTS / "replay" / run.game.lower() / f"{run.variant}-{run.seed}.csv"


def _table(kept: list[Run]) -> Iterator[str]:
    """Yields the lines of a game's table."""
    yield f"| {kept[0].game} | " + " | ".join(f"{steps:,}" for steps in MILESTONES) + " |"
    yield "| --- |" + " --- |" * len(MILESTONES)
    for variant in dict.fromkeys(run.variant for run in kept):
        of_seeds = [rows_of(_kept(run)) for run in kept if run.variant == variant]
        yield f"| {variant} | " + " | ".join(_cell(of_seeds, at) for at in MILESTONES) + " |"


def _cell(of_seeds: list[list[Row]], milestone: int) -> str:
    """Returns the median over the runs, and each run's figure."""
    found = [value for rows in of_seeds if (value := return_at(rows, milestone)) is not None]
    if len(found) < len(of_seeds):
        return ""
    return f"**{statistics.median(found):.1f}** ({', '.join(f'{value:.1f}' for value in found)})"


def rows_of(kept: Path) -> list[Row]:
    """Returns the rows of a kept run, without empty cells."""
    return [*read_logs(kept)]


def return_at(rows: Iterable[Row], milestone: int) -> float | None:
    """Returns the mean return of the episodes that ended in the tenth of the steps before a
    milestone; None where the run did not reach it. `episodes` are those that ended in a row.
    """
    games, total, last = 0.0, 0.0, 0.0
    for row in rows:
        last = row["step"]
        if 0.9 * milestone < last <= 1.01 * milestone and "mean_episode_return" in row:
            games, total = (
                games + row["episodes"],
                total + row["episodes"] * row["mean_episode_return"],
            )
    return total / games if games and last >= 0.99 * milestone else None


if __name__ == "__main__":
    main()
