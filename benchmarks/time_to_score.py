# SPDX-License-Identifier: Apache-2.0
"""Compares how soon programs reach a score: returns over minutes since the start of each command.

usage: PYTHONPATH=.:benchmarks python benchmarks/time_to_score.py train RUNS TASK [--seeds 101 102]
       PYTHONPATH=.:benchmarks python benchmarks/time_to_score.py keep RUNS

`train` runs the programs of a task one after the other, each with the settings that its authors
published, for an hour at most. Let nothing run beside. Runs that have ended are skipped, so the
same command continues after an interruption. `keep` writes the returns of training episodes to
docs/results/time-to-score, draws all that is there, and prints a table.

Each peer has a Python of its own, named by a variable:
  RL_ZOO_PYTHON          with rl_zoo3, gymnasium[mujoco] and box2d
  SAMPLE_FACTORY_PYTHON  as sample_factory.py makes it
  CLEANRL_PYTHON         with torch, envpool, gym and tensorboard; CLEANRL is a checkout
  ORIGINAL_PYTHON        with the requirements of TorchBeast 2019; ORIGINAL is a checkout
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from progress import HERE, Reading, running
from result_figures import FIGURES, RESULTS, Panel, draw

from torchbeast import plot
from torchbeast.reporting.log_files import read_logs

LIMIT_S = 3600.0
WINDOWS = 240  # rows of a kept curve
FOLDER = RESULTS / "time-to-score"


def _of_torchbeast(folder: Path) -> list[Reading]:
    rows = [row for row in read_logs(folder / "run") if plot.RETURN in row]
    values = [(row["_time"], row[plot.RETURN]) for row in rows]
    return [reading for reading in values if not math.isnan(reading[1])]  # as in 2019


def _of_rl_zoo(folder: Path) -> list[Reading]:
    """Reads the episodes of its monitors, a file for each environment."""
    readings = []
    for path in folder.glob("*/*/*.monitor.csv"):
        header, *lines = path.read_text().splitlines()
        began = json.loads(header.removeprefix("#"))["t_start"]
        readings += [(began + float(row["t"]), float(row["r"])) for row in csv.DictReader(lines)]
    return sorted(readings)


def _of_sample_factory(folder: Path) -> list[Reading]:
    """Reads its log, which has means over the last 100 episodes."""
    found = re.findall(
        r"\[(\d{4}-\S+ [\d:]+,\d+)\].*Avg episode reward: \[\(0, '(\S+)'\)",
        (folder / "output.txt").read_text(errors="replace"),
    )
    return [
        (datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp(), float(mean))
        for when, mean in found
        if mean != "nan"
    ]


def _of_cleanrl(folder: Path) -> list[Reading]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = (folder / "runs").iterdir()
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.wall_time, event.value) for event in events.Scalars("charts/episodic_return")]


class Contestant(NamedTuple):
    """A program: its label, its command and how to read the returns of its episodes."""

    label: str
    command: str  # {seed} and {folder} are filled in, variables expanded
    readings: Callable[[Path], list[Reading]]


def _ours(program: str, flags: str) -> Contestant:
    python = f"env PYTHONPATH={HERE.parent} {sys.executable}"
    command = f"{python} -m torchbeast.{program} --savedir {{folder}} --xpid run --seed {{seed}}"
    return Contestant("TorchBeast", f"{command} {flags}", _of_torchbeast)


def _rl_zoo(algorithm: str, env: str) -> Contestant:
    command = f"$RL_ZOO_PYTHON -m rl_zoo3.train --algo {algorithm} --env {env} --eval-freq -1"
    label = f"Stable-Baselines3, {algorithm.upper()}"
    return Contestant(label, f"{command} --seed {{seed}} -f {{folder}}", _of_rl_zoo)


SCORES = {"pong": 18.0, "lunarlander": 200.0, "hopper": 2000.0}
TITLES = {"pong": "Pong", "lunarlander": "LunarLander-v3", "hopper": "Hopper-v4"}
CONTESTANTS = {
    "pong": {
        "torchbeast": _ours("polybeast", "--preset pong-impala"),
        "sample-factory": Contestant(
            "Sample Factory, APPO",
            f"$SAMPLE_FACTORY_PYTHON -I {HERE / 'sample_factory_atari.py'} --env=atari_pong"
            " --device=cpu --train_dir={folder} --experiment=run --seed={seed}",
            _of_sample_factory,
        ),
        "cleanrl": Contestant(
            "CleanRL, PPO",
            "$CLEANRL_PYTHON $CLEANRL/cleanrl/ppo_atari_envpool.py --env-id Pong-v5 --seed {seed}",
            _of_cleanrl,
        ),
        "original": Contestant(
            "TorchBeast 2019, MonoBeast",
            "env PYTHONPATH=$ORIGINAL $ORIGINAL_PYTHON -m torchbeast.monobeast --savedir {folder}"
            " --xpid run --env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000"
            " --learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4"
            " --unroll_length 80 --num_buffers 60 --num_threads 4",
            _of_torchbeast,
        ),
    },
    "lunarlander": {
        "torchbeast": _ours("monobeast", "--preset lunarlander-ppo"),
        "sb3-ppo": _rl_zoo("ppo", "LunarLander-v3"),
    },
    "hopper": {
        "torchbeast": _ours("monobeast", "--preset hopper-ppo --env Hopper-v4"),
        "sb3-ppo": _rl_zoo("ppo", "Hopper-v4"),
        "sb3-sac": _rl_zoo("sac", "Hopper-v4"),
    },
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["train", "keep"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("task", nargs="?", choices=list(CONTESTANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--only", nargs="+", help="such as: torchbeast")
    arguments = parser.parse_args()
    if arguments.command == "keep":
        keep(arguments.runs.resolve())
        return
    contestants = CONTESTANTS[arguments.task]
    for seed in arguments.seeds:
        for name in arguments.only or contestants:
            train(contestants[name], arguments.runs.resolve() / f"{arguments.task}_{name}_{seed}")


def train(contestant: Contestant, folder: Path) -> None:
    """Runs a program for an hour at most, unless it has done so."""
    if (folder / "run.json").exists():
        return
    folder.mkdir(parents=True)  # fails if an earlier run was interrupted: delete it then
    seed = folder.name.rpartition("_")[2]
    filled = contestant.command.format(seed=seed, folder=folder)
    command = shlex.split(os.path.expandvars(filled))
    began = time.time()
    os.chdir(folder)  # CleanRL writes to the current one
    with running(command, {}, folder / "output.txt") as program:
        try:
            exit_code = program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            exit_code = 0
    if exit_code:
        sys.exit(f"it ended with {exit_code}; see {folder / 'output.txt'}")
    record = {"began": began, "ended": time.time(), "command": contestant.command}
    (folder / "run.json").write_text(json.dumps(record))


def keep(runs: Path) -> None:
    """Writes a curve for each run, draws them and prints when they reached the score."""
    FOLDER.mkdir(exist_ok=True)
    for path in sorted(runs.glob("*/run.json")):
        record = json.loads(path.read_text())
        task, name, seed = path.parent.name.split("_")
        readings = CONTESTANTS[task][name].readings(path.parent)
        write(FOLDER / f"{task}-{name}-{seed}.csv", record, readings)
    FIGURES["time-to-score/curves"] = [panel_of(task) for task in CONTESTANTS]
    draw("time-to-score/curves")
    print("| task | program | minutes to the score | return at the end |")
    print("| --- | --- | --- | --- |")
    for task, contestants in CONTESTANTS.items():
        for name, contestant in contestants.items():
            curves = [plot.curve(path, True) for path in FOLDER.glob(f"{task}-{name}-*.csv")]
            reached = ", ".join(minutes_to(SCORES[task], points) for points in curves)
            ends = ", ".join(f"{points[-1][1]:,.4g}" for points in curves)
            print(f"| {task}, {SCORES[task]:g} | {contestant.label} | {reached} | {ends} |")


def panel_of(task: str) -> Panel:
    """Returns the panel of a task, with the programs that have run."""
    patterns = {
        contestant.label: f"time-to-score/{task}-{name}-*.csv"
        for name, contestant in CONTESTANTS[task].items()
    }
    lines = {label: pattern for label, pattern in patterns.items() if any(RESULTS.glob(pattern))}
    score = SCORES[task]
    return Panel(TITLES[task], lines, marks={f"score {score:g}": score}, is_clock=True)


def write(path: Path, record: dict[str, Any], readings: list[Reading]) -> None:
    """Writes the means of the readings in windows of equal length, below the command."""
    width = (record["ended"] - record["began"]) / WINDOWS
    windows: dict[int, list[float]] = {}
    for when, value in readings:
        windows.setdefault(int((when - record["began"]) / width), []).append(value)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {record['command'].replace(sys.executable, 'python')}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "seconds", plot.RETURN])
        writer.writerow([0, 0, ""])
        for window, values in sorted(windows.items()):
            seconds = (window + 1) * width
            writer.writerow([0, f"{seconds:.1f}", f"{statistics.fmean(values):.5g}"])


def minutes_to(score: float, points: plot.Points) -> str:
    """Returns when the mean of five windows first reaches the score."""
    return next((f"{minutes:.1f}" for minutes, value in points if value >= score), "not reached")


if __name__ == "__main__":
    main()
