# SPDX-License-Identifier: Apache-2.0
"""Compares learning with and without replay, in two games of MinAtar with several seeds each.

usage: PYTHONPATH=.:benchmarks python benchmarks/replay_learning.py train RUNS_FOLDER
       PYTHONPATH=.:benchmarks python benchmarks/replay_learning.py keep RUNS_FOLDER

`train` trains every variant of `VARIANTS` with MonoBeast, one run after the other, and skips runs
that are complete, so that the same command continues after an interruption. `keep` writes a CSV for
each run that exists and a curve per game to docs/results/replay, and prints their tables. Use seeds
that the settings were not tuned on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from keep_results import RESULTS, write_thinned

from torchbeast import plot
from torchbeast.reporting.log_files import read_logs

GAMES = ("Breakout", "SpaceInvaders")
STEPS = 1_000_000
HALF = STEPS // 2
MILESTONES = (100_000, 250_000, 500_000, 750_000, 1_000_000)
RATIOS = (1, 2, 4, 7)
ENTROPY_COST = 0.03  # the preset's
SMALL = ("--batch_size", "8")  # new rollouts; with 7 replayed ones for each, a batch has 64

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


def _replay(
    steps: int, ratio: int, size: int = 200_000, entropy_cost: float | None = None
) -> Flags:
    """Returns the flags of a replay.

    entropy_cost: by default as much for each state that is learnt from as without replay. The bonus
        counts over new rollouts only, so its cost grows with what is learnt beside them.
    """
    cost = (1 + ratio) * ENTROPY_COST if entropy_cost is None else entropy_cost
    return (
        *("--total_steps", str(steps), "--replay_size", str(size)),
        *("--replay_ratio", str(ratio), "--entropy_cost", f"{cost:g}"),
    )


VARIANTS: dict[str, Flags] = {
    "no-replay": ("--total_steps", str(STEPS)),
    "ratio-4": _replay(STEPS, 4),
    **{f"ratio-{ratio}-half": _replay(HALF, ratio) for ratio in RATIOS},
    "replay-alone": (
        *_replay(STEPS, 4, size=STEPS, entropy_cost=ENTROPY_COST),
        *("--algo", "replay_alone:ReplayAlone", "--learn_start", "20000"),
    ),
    "no-replay-small": ("--total_steps", str(STEPS), *SMALL),
    "ratio-7-small-half": (*_replay(HALF, 7, entropy_cost=0.12), *SMALL),
    "replay-alone-small-half": (
        *_replay(HALF, 7, size=HALF, entropy_cost=0.015),  # for each state as much as 0.12 above
        *("--algo", "replay_alone:ReplayAlone", "--learn_start", "20000"),
        *SMALL,
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
        keep([run for run in planned if run.game == game and (runs / run.name).exists()], runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("train", "keep"))
    parser.add_argument("runs", type=Path, help="the folder of the runs")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 42, 43])
    return parser.parse_args()


def train(run: Run, runs: Path) -> None:
    """Trains one run and prints its summary; a complete run says that nothing is left to do."""
    flags = ["--preset", "minatar-breakout", "--env", f"MinAtar/{run.game}-v1"]
    place = ["--savedir", str(runs), "--xpid", run.name, "--seed", str(run.seed)]
    command = [sys.executable, "-m", "torchbeast.monobeast", *flags, *VARIANTS[run.variant], *place]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("Learnt")]
    print(run.name, *said, flush=True)


def keep(planned: list[Run], runs: Path) -> None:
    """Keeps the runs of one game and prints its table."""
    target = RESULTS / "replay" / planned[0].game.lower()
    target.mkdir(parents=True, exist_ok=True)
    for run in planned:
        write_thinned(runs / run.name, target / f"{run.variant}-{run.seed}.csv")
    kept = [str(target / f"{run.variant}-{run.seed}.csv") for run in planned]
    plot.main([*kept, "--output", str(target / "curve.png")])
    print("\n".join(_table(planned, runs)))


def _table(planned: list[Run], runs: Path) -> Iterator[str]:
    """Yields the lines of a game's table."""
    yield f"| {planned[0].game} | " + " | ".join(f"{steps:,}" for steps in MILESTONES) + " |"
    yield "| --- |" + " --- |" * len(MILESTONES)
    for variant in dict.fromkeys(run.variant for run in planned):
        folders = [runs / run.name for run in planned if run.variant == variant]
        yield f"| {variant} | " + " | ".join(_cell(folders, at) for at in MILESTONES) + " |"


def _cell(folders: list[Path], milestone: int) -> str:
    """Returns the median over the runs, and each run's figure."""
    found = [value for folder in folders if (value := return_at(folder, milestone)) is not None]
    if len(found) < len(folders):
        return ""
    return f"**{statistics.median(found):.1f}** ({', '.join(f'{value:.1f}' for value in found)})"


def return_at(folder: Path, milestone: int) -> float | None:
    """Returns the mean return of the episodes that ended in the tenth of the steps before a
    milestone; None where the run did not reach it.
    """
    games, total, before, last = 0.0, 0.0, 0.0, 0.0
    for row in read_logs(folder):
        ended, before = row.get("episodes", before) - before, row.get("episodes", before)
        last = row["step"]
        if 0.9 * milestone < last <= milestone and ended and "mean_episode_return" in row:
            games, total = games + ended, total + ended * row["mean_episode_return"]
    return total / games if games and last >= 0.99 * milestone else None


if __name__ == "__main__":
    main()
