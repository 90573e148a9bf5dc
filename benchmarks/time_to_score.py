# SPDX-License-Identifier: Apache-2.0
"""Compares how soon programs reach a score: returns over minutes since the start of each command.

usage: PYTHONPATH=.:benchmarks python benchmarks/time_to_score.py train RUNS TASK [--seeds 101 102]
       PYTHONPATH=.:benchmarks python benchmarks/time_to_score.py keep RUNS

`train` runs the programs of a task one after the other, each with the settings that its authors
published, for an hour at most. Let nothing run beside. Runs that have ended are skipped, so the
same command continues after an interruption. `keep` writes the mean returns of the last 100
training episodes to docs/results/time-to-score, draws all that is there, and prints a table.

Each peer has a Python of its own, named by a variable:
  RL_ZOO_PYTHON          with rl_zoo3, gymnasium[mujoco], box2d and pygame
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
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from figures import machine
from progress import HERE, Reading, running
from result_figures import FIGURES, RESULTS, Panel, draw

from torchbeast import plot
from torchbeast.reporting.log_files import read_logs

LIMIT_S = 3600.0
EPISODES = 100  # in a mean; Sample Factory logs no other
ROW_S = 10.0  # seconds between rows of a kept curve
COLUMN = "mean_return"  # of the last 100 episodes
FOLDER = RESULTS / "time-to-score"


def _means(episodes: Iterable[Reading]) -> list[Reading]:
    """Returns the mean of the last 100 episodes after each one, from the hundredth on."""
    recent: deque[float] = deque(maxlen=EPISODES)
    means = []
    for when, value in episodes:
        recent.append(value)
        if len(recent) == EPISODES:
            means.append((when, statistics.fmean(recent)))
    return means


def _of_torchbeast(folder: Path) -> list[Reading]:
    """Reads its log, whose rows have means over some episodes; those of 2019 do not say how many,
    and have NaN for none.
    """
    episodes, before = [], 0.0
    for row in read_logs(folder / "run"):
        if not math.isnan(mean := row.get(plot.RETURN, math.nan)):
            ended = row.get("episodes", before + 1)
            episodes += round(ended - before) * [(row["_time"], mean)]
            before = ended
    return _means(episodes)


def _of_rl_zoo(folder: Path) -> list[Reading]:
    """Reads the episodes of its monitors, a file for each environment."""
    episodes = []
    for path in folder.glob("*/*/*.monitor.csv"):
        header, *lines = path.read_text().splitlines()
        began = json.loads(header.removeprefix("#"))["t_start"]
        episodes += [(began + float(row["t"]), float(row["r"])) for row in csv.DictReader(lines)]
    return _means(sorted(episodes))


def _of_sample_factory(folder: Path) -> list[Reading]:
    """Reads its log, which has means over the last 100 episodes, or at first over fewer."""
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
    tag = "charts/episodic_return"
    episodes = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    return _means((episode.wall_time, episode.value) for episode in episodes)


class Contestant(NamedTuple):
    """A program: its label, its command and how to read its mean returns from its folder."""

    label: str
    command: str  # {seed} and {folder} are filled in, variables expanded
    readings: Callable[[Path], list[Reading]]


def _ours(program: str, flags: str) -> Contestant:
    python = f"env PYTHONPATH={HERE.parent} {sys.executable}"
    command = f"{python} -m torchbeast.{program} --savedir {{folder}} --xpid run --seed {{seed}}"
    return Contestant("TorchBeast", f"{command} {flags}", _of_torchbeast)


def _rl_zoo(algorithm: str, env: str) -> Contestant:
    command = f"$RL_ZOO_PYTHON -m rl_zoo3.train --algo {algorithm} --env {env} --seed {{seed}}"
    flags = "-f {folder} --eval-freq -1 --num-threads 1"  # one thread is faster, say its authors
    return Contestant(f"Stable-Baselines3, {algorithm.upper()}", f"{command} {flags}", _of_rl_zoo)


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
    runs = arguments.runs.resolve()
    if arguments.command == "keep":
        keep(runs)
        return
    if arguments.task is None:
        parser.error(f"train needs a task: {', '.join(CONTESTANTS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("stopped"))  # the program ends too
    contestants = CONTESTANTS[arguments.task]
    failed = [
        folder
        for seed in arguments.seeds
        for name in arguments.only or contestants
        if not train(contestants[name], folder := runs / f"{arguments.task}_{name}_{seed}")
    ]
    if failed:
        sys.exit(f"failed, see output.txt in: {', '.join(map(str, failed))}")


def train(contestant: Contestant, folder: Path) -> bool:
    """Runs a program for an hour at most, unless it has done so; returns whether it has returns."""
    if (folder / "run.json").exists():
        return True
    commit = subprocess.check_output(["git", "-C", HERE, "rev-parse", "HEAD"], text=True)
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    folder.mkdir(parents=True)
    seed = folder.name.rpartition("_")[2]
    command = contestant.command.format(seed=seed, folder=folder)
    began = time.time()
    arguments = shlex.split(os.path.expandvars(command))
    with running(arguments, {}, folder / "output.txt", cwd=folder) as program:
        try:
            exit_code = program.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            exit_code = 0
    if exit_code or not contestant.readings(folder):
        return False
    shown = contestant.command.format(seed=seed, folder="RUN").replace(sys.executable, "python")
    record = {
        "commit": commit.strip(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "command": shown.replace(f"env PYTHONPATH={HERE.parent} ", "").replace(f"{HERE}/", ""),
        "began": began,
    }
    (folder / "run.json").write_text(json.dumps(record))
    return True


def keep(runs: Path) -> None:
    """Writes a curve for each run; draws all that are there, and prints when they reached the
    score.
    """
    FOLDER.mkdir(exist_ok=True)
    for task, contestants in CONTESTANTS.items():
        for name, contestant in contestants.items():
            for path in runs.glob(f"{task}_{name}_*/run.json"):
                record = json.loads(path.read_text())
                last = record["began"] + LIMIT_S  # it may log while it ends
                means = [row for row in contestant.readings(path.parent) if row[0] <= last]
                write(FOLDER / f"{path.parent.name.replace('_', '-')}.csv", record, means)
    print("| task | program | minutes to the score | at the end |\n| --- | --- | --- | --- |")
    for task, contestants in CONTESTANTS.items():
        for name, contestant in contestants.items():
            if curves := [*map(read, sorted(FOLDER.glob(f"{task}-{name}-*.csv")))]:
                reached = ", ".join(minutes_to(SCORES[task], curve) for curve in curves)
                ends = ", ".join(f"{curve[-1][1]:,.4g}" for curve in curves)
                goal = f"{TITLES[task]}, {SCORES[task]:g}"
                print(f"| {goal} | {contestant.label} | {reached} | {ends} |")
    panels = map(panel_of, CONTESTANTS)
    FIGURES["time-to-score/curves"] = [panel for panel in panels if panel.lines]
    draw("time-to-score/curves")


def read(path: Path) -> list[Reading]:
    """Returns a kept curve: seconds since the start, and mean returns."""
    return [(row["seconds"], row[COLUMN]) for row in read_logs(path) if COLUMN in row]


def minutes_to(score: float, curve: list[Reading]) -> str:
    """Returns the minutes from the start until the mean first reaches the score."""
    reached = (seconds for seconds, mean in curve if mean >= score)
    return next((f"{seconds / 60:.1f}" for seconds in reached), "not reached")


def panel_of(task: str) -> Panel:
    """Returns the panel of a task, with the programs that have run."""
    patterns = {
        contestant.label: f"time-to-score/{task}-{name}-*.csv"
        for name, contestant in CONTESTANTS[task].items()
    }
    lines = {label: pattern for label, pattern in patterns.items() if any(RESULTS.glob(pattern))}
    score = SCORES[task]
    marks = {f"score {score:g}": score}
    return Panel(TITLES[task], lines, marks=marks, is_clock=True, column=COLUMN)


def write(path: Path, record: dict[str, Any], means: list[Reading]) -> None:
    """Writes the last mean of every ten seconds, below the provenance."""
    last = {int((when - record["began"]) / ROW_S): mean for when, mean in means}
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {key} {value}\n" for key, value in record.items() if key != "began")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "seconds", COLUMN])
        writer.writerow([0, 0, ""])  # where the clock begins
        writer.writerows([0, (row + 1) * ROW_S, f"{mean:.5g}"] for row, mean in last.items())


if __name__ == "__main__":
    main()
