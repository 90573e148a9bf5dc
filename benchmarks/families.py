# SPDX-License-Identifier: Apache-2.0
"""Trains on many families of environments, and writes a table of speeds and returns.

pip install what you want to try (crafter and bsuite need gym==0.26.2 too), then

python benchmarks/families.py --json families.json --page docs/reference/environments.md

MonoBeast with PPO trains for --learn_seconds, and its returns are compared; the others train for
--seconds. Families whose package is missing keep the entries that the JSON file has of an earlier
call.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

RUNS = (("monobeast", "ppo"), ("monobeast", "q"), ("polybeast", "impala"))
"""Program and algorithm; q: dqn, or sac where actions are a Box."""


class Family(NamedTuple):
    """An environment that stands for its family."""

    title: str
    env: str
    package: str = ""  # the module that must be installed; "": the one before the colon
    kwargs: str = ""  # JSON
    agents: int = 1
    is_box: bool = False
    flags: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return find_spec(self.package or self.env.partition(":")[0]) is not None


_OF_PPO = ("--learning_rate=0.001", "--normalise_returns", "--reward_clipping=none")
_KEYS = ("--observation_keys", "image", "direction")

FAMILIES = (
    Family("Gymnasium, classic control", "CartPole-v1", "gymnasium"),
    Family("Gymnasium, continuous", "Pendulum-v1", "gymnasium", is_box=True),
    Family("Gymnasium, toy text", "FrozenLake-v1", "gymnasium"),
    Family("Gymnasium, tuples", "Blackjack-v1", "gymnasium"),
    Family("Gymnasium, Box2D", "LunarLander-v3", "Box2D"),
    Family("Gymnasium, MuJoCo", "HalfCheetah-v5", "mujoco", is_box=True),
    Family("Gymnasium, vector", "gymnasium:make_vec", kwargs='{"id": "Acrobot-v1"}'),
    Family("ALE", "ALE/Breakout-v5", "ale_py"),
    Family("MinAtar", "MinAtar/Breakout-v1", "minatar"),
    Family(
        "MiniGrid",
        "minigrid:MiniGrid-Empty-5x5-v0",
        flags=_KEYS,
    ),
    Family("NetHack", "nle:NetHackScore-v0"),
    Family("PyBullet", "pybullet_envs_gymnasium:HopperBulletEnv-v0", is_box=True),
    Family("Gymnasium-Robotics", "gymnasium_robotics:FetchReach-v4", is_box=True),
    Family("panda-gym", "panda_gym:PandaReach-v3", is_box=True),
    Family("highway-env", "highway_env:highway-fast-v0"),
    Family("Crafter", "crafter:Env"),
    Family("POPGym", "popgym:popgym-RepeatPreviousEasy-v0", flags=("--use_lstm",)),
    Family("Flappy Bird", "flappy_bird_gymnasium:FlappyBird-v0"),
    Family("gym-anytrading", "gym_anytrading:stocks-v0"),
    Family("Tetris", "tetris_gymnasium.envs.tetris:Tetris", "tetris_gymnasium"),
    Family("MO-Gymnasium", "families:deep_sea_treasure", "mo_gymnasium"),
    Family("ViZDoom", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1", "vizdoom"),
    Family("DM Control", "shimmy:dm_control/cartpole-swingup-v0", "dm_control", is_box=True),
    Family("bsuite", "families:bsuite_catch", "bsuite"),
    Family("PettingZoo, classic", "pettingzoo:classic/connect_four_v3", agents=2),
    Family("PettingZoo, MPE", "pettingzoo:mpe/simple_spread_v3", "mpe2", agents=3),
    Family("PettingZoo, SISL", "pettingzoo:sisl/pursuit_v5", "pymunk", agents=8),
    Family("PettingZoo, Butterfly", "pettingzoo:butterfly/cooperative_pong_v6", "pymunk", agents=2),
    Family("EnvPool, classic control", "envpool:CartPole-v1"),
    Family("EnvPool, Atari", "envpool:Pong-v5"),
    Family("EnvPool, MuJoCo", "envpool:HalfCheetah-v4", is_box=True),
    Family("EnvPool, Procgen", "envpool:CoinrunEasy-v0"),
    Family("EnvPool, MiniGrid", "envpool:MiniGrid-Empty-5x5-v0"),
)


def deep_sea_treasure() -> Any:
    """Returns an environment of MO-Gymnasium whose reward is a weighted sum."""
    import mo_gymnasium
    import numpy as np

    env = mo_gymnasium.make("deep-sea-treasure-v0")
    return mo_gymnasium.wrappers.LinearReward(env, weight=np.array([0.8, 0.2]))


def bsuite_catch() -> Any:
    """Returns an environment of bsuite with the interface of old Gym."""
    import bsuite
    from bsuite.utils.gym_wrapper import GymFromDMEnv

    return GymFromDMEnv(bsuite.load_from_id("catch/0"))


def main() -> None:
    arguments = _arguments()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the programs inherit one core
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for family in FAMILIES:
        if arguments.only and not re.search(arguments.only, family.title):
            continue
        if not family.is_installed:
            print(f"{family.title} is not installed")
            continue
        rows = found.setdefault(family.title, {})
        for program, kind in RUNS:
            algo = kind if kind != "q" else "sac" if family.is_box else "dqn"
            if algo == "dqn" and "--use_lstm" in family.flags:
                continue
            seconds = arguments.learn_seconds if kind == "ppo" else arguments.seconds
            rows[f"{program} {kind}"] = outcome = _run(family, program, algo, seconds)
            print(f"{family.title}, {program} {algo}: {outcome}", flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.page is not None:
        arguments.page.write_text(_page(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a run")
    parser.add_argument("--learn_seconds", type=float, default=45.0, help="of PPO's run")
    parser.add_argument("--json", type=Path, default=Path("families.json"))
    parser.add_argument("--page", type=Path, help="the Markdown page to write")
    parser.add_argument("--only", help="a regular expression of titles")
    return parser.parse_args()


def _run(family: Family, program: str, algo: str, seconds: float) -> dict[str, Any]:
    """Returns steps_s and the returns of early and late episodes, or `said`: the reason for which a
    run ended before its first update.

    seconds: from the first update on.
    """
    actors = 8 * family.agents
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", f"torchbeast.{program}", "--env", family.env, "--algo", algo),
            *(f"--num_envs={actors}", "--unroll_length=32", f"--savedir={folder}", "--xpid=x"),
            *("--total_steps=1000000000", "--disable_checkpoint", "--seed=1"),
            *(("--env_kwargs", family.kwargs) if family.kwargs else ()),
            *family.flags,
            *((f"--batch_size={actors}",) if algo in ("impala", "ppo") else ("--learn_start=200",)),
            *(_OF_PPO if algo == "ppo" else ()),
            *(("--num_servers=1",) if program == "polybeast" else ("--num_workers=1",)),
        ]
        said = _output(command, Path(folder), seconds)
        log = Path(folder, "x", "logs.csv")
        rows = list(csv.DictReader(log.open())) if log.exists() else []
    if len(rows) > 1:
        return {"steps_s": _speed_of(rows), **_returns(rows, actors)}
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    refused = [line.removeprefix(f"{program}: ") for line in lines if line.startswith(program)]
    return {"said": (errors or refused or lines or ["nothing was printed"])[-1]}


def _output(command: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs a program until so long after its first update; returns what it printed."""
    output, log = folder / "output.txt", folder / "x" / "logs.csv"
    with output.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    end, is_learning = time.monotonic() + _PATIENCE_S, False
    while run.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        if not is_learning and log.exists() and len(log.read_text().splitlines()) > 1:
            end, is_learning = time.monotonic() + seconds, True
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
    run.wait()
    return output.read_text()


def _speed_of(rows: Sequence[dict[str, str]]) -> float:
    """Returns the steps/s between the first and the last update."""
    first, last = rows[0], rows[-1]
    spent = float(last["_time"]) - float(first["_time"])
    return (float(last["step"]) - float(first["step"])) / spent


def _returns(rows: Sequence[dict[str, str]], actors: int) -> dict[str, Any]:
    """Returns the mean returns of 20 early and the last 20 updates with an episode (or a fifth),
    and whether the last is higher by three standard errors.

    Updates before an environment could end the longest episode do not count: the episodes that have
    ended by then are the short ones.
    """
    ended = [row for row in rows if row["mean_episode_return"]]
    longest = max((float(row["mean_episode_length"]) for row in ended), default=0.0)
    ended = [row for row in ended if float(row["step"]) >= actors * longest]
    found = [float(row["mean_episode_return"]) for row in ended]
    if (count := min(20, len(found) // 5)) < 5:
        return {}
    parts = found[:count], found[-count:]
    first, last = map(statistics.fmean, parts)
    error = math.sqrt(sum(statistics.variance(part) / count for part in parts))
    return {"first": first, "last": last, "learns": last - first > 3 * error}


_PATIENCE_S = 60.0  # for the first update
_HEAD = """\
# Tested environments

One environment of each family, with 8 environments (or games) in one process on one shared core, on
2026-11-27 with the latest releases. After the first update, PPO trained for 45 seconds with the
same settings everywhere (`--learning_rate 0.001 --normalise_returns --reward_clipping none`), and
DQN, SAC and IMPALA for 10 seconds.

*Returns* are PPO's means over 20 early updates and over the last 20 updates in which an episode
ended, if there were enough. **Bold** returns rose by more than three standard errors. Many tasks
need more time or tuned settings; see [results](../results/README.md). `benchmarks/families.py`
writes this page. The other cells mean:

* *fails*: Gymnasium-Robotics and DM Control raise errors with the latest MuJoCo, and Procgen needs
  system libraries.
* *memory*: large images need a smaller `--replay_size` than 100,000 steps.
* *slow*: no update within the time limit.

| family | environment | returns, PPO | MonoBeast, PPO: steps/s | MonoBeast, DQN or SAC: steps/s | \
PolyBeast, IMPALA: steps/s |
| --- | --- | --- | --- | --- | --- |"""


def _page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [_HEAD]
    for family in FAMILIES:
        if not (rows := found.get(family.title)):
            continue
        ppo, q, impala = (rows.get(f"{program} {kind}") for program, kind in RUNS)
        flags = f" `{' '.join(family.flags)}`" if family.flags else ""
        told = " | ".join((_change(ppo or {}), _speed(ppo), _speed(q), _speed(impala)))
        lines.append(f"| {family.title} | `{family.env}`{flags} | {told} |")
    return "\n".join(lines) + "\n"


def _change(outcome: dict[str, Any]) -> str:
    if "first" not in outcome:
        return ""
    told = f"{outcome['first']:.3g} → {outcome['last']:.3g}"
    return f"**{told}**" if outcome["learns"] else told


def _speed(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return ""
    if "steps_s" in outcome:
        return f"{outcome['steps_s']:,.0f}"
    said = outcome["said"]
    return "slow" if "SIGINT" in said else "memory" if "of memory" in said else "fails"


if __name__ == "__main__":
    main()
