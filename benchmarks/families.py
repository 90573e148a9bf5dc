# SPDX-License-Identifier: Apache-2.0
"""Trains PPO on many families of environments, and updates their page.

pip install what you want to try, then

python benchmarks/families.py --only minatar

Environments that are not chosen or not installed keep the returns that the page has.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast.reporting.log_files import read_logs

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "environments.md"
ZOO = PAGE.parents[1] / "results" / "zoo.md"


class Family(NamedTuple):
    """An environment that stands for its family."""

    env: str
    install: str = ""  # next to TorchBeast; [...]: an extra of it
    zoo: str = ""  # its family there
    package: str = ""  # the module that must be installed; "": the one before the colon
    agents: int = 1
    flags: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return find_spec(self.package or self.env.partition(":")[0]) is not None


FAMILIES = (
    Family("CartPole-v1", zoo="Classic control", package="gymnasium"),
    Family("Pendulum-v1", zoo="Classic control", package="gymnasium"),
    Family("FrozenLake-v1", package="gymnasium"),
    Family("Blackjack-v1", package="gymnasium"),
    Family("LunarLander-v3", "gymnasium[box2d]", "Box2D", "Box2D"),
    Family("HalfCheetah-v5", "[mujoco]", "MuJoCo", "mujoco"),
    Family("gymnasium:make_vec", flags=("--env_kwargs", '{"id": "Acrobot-v1"}')),
    Family("ALE/Breakout-v5", zoo="Atari", package="ale_py"),
    Family("MinAtar/Breakout-v1", "[minatar]", "MinAtar", "minatar"),
    Family(
        "minigrid:MiniGrid-Empty-5x5-v0",
        "[minigrid]",
        "MiniGrid",
        flags=("--observation_keys", "image", "direction"),
    ),
    Family("nle:NetHackScore-v0", "[nethack]"),
    Family("pybullet_envs_gymnasium:HopperBulletEnv-v0", "[pybullet]"),
    Family("gymnasium_robotics:FetchReach-v4", "[robotics]"),
    Family("panda_gym:PandaReach-v3", "panda-gym"),
    Family("highway_env:highway-fast-v0", "highway-env"),
    Family("crafter:Env", "crafter gym==0.26.2"),
    Family("popgym:popgym-RepeatPreviousEasy-v0", "popgym", flags=("--use_lstm",)),
    Family("flappy_bird_gymnasium:FlappyBird-v0", "flappy-bird-gymnasium"),
    Family("gym_anytrading:stocks-v0", "gym-anytrading"),
    Family("tetris_gymnasium.envs.tetris:Tetris", "tetris-gymnasium", package="tetris_gymnasium"),
    Family("families:deep_sea_treasure", "mo-gymnasium", package="mo_gymnasium"),
    Family("vizdoom.gymnasium_wrapper:VizdoomBasic-v1", "vizdoom", package="vizdoom"),
    Family("shimmy:dm_control/cartpole-swingup-v0", "[dm-control]", package="dm_control"),
    Family("families:bsuite_catch", "bsuite gym==0.26.2", package="bsuite"),
    Family("pettingzoo:classic/connect_four_v3", "[pettingzoo]", "Several agents", agents=2),
    Family("pettingzoo:mpe/simple_spread_v3", "[pettingzoo]", "Several agents", "mpe2", agents=3),
    Family("pettingzoo:sisl/pursuit_v5", "pettingzoo[sisl]", package="pymunk", agents=8),
    Family(
        "pettingzoo:butterfly/cooperative_pong_v6",
        "pettingzoo[butterfly]",
        package="pymunk",
        agents=2,
    ),
    Family("envpool:CartPole-v1", "[envpool]", "Classic control"),
    Family("envpool:Pong-v5", "[envpool]", "Atari"),
    Family("envpool:HalfCheetah-v4", "[envpool]", "MuJoCo"),
    Family("envpool:CoinrunEasy-v0", "[envpool]"),
    Family("envpool:MiniGrid-Empty-5x5-v0", "[envpool]", "MiniGrid"),
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
    rows = (line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    returns = {row[0].strip("| `"): row[2].strip() for row in rows}
    for family in FAMILIES:
        if family.is_installed and re.search(arguments.only, family.env, re.IGNORECASE):
            returns[family.env] = _run(family, arguments.seconds)
            print(f"{family.env}: {returns[family.env]}", flush=True)
    PAGE.write_text(_page(returns))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of a run")
    parser.add_argument("--only", default="", help="a regular expression of environments")
    return parser.parse_args()


def _run(family: Family, seconds: float) -> str:
    """Trains for so long after the first update; returns the change of the returns as a cell."""
    actors = 8 * family.agents
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torchbeast.monobeast", "--env", family.env, "--algo=ppo"),
            *(f"--num_envs={actors}", "--unroll_length=32", f"--savedir={folder}", "--xpid=x"),
            *("--total_steps=1000000000", "--disable_checkpoint", "--seed=1", "--num_workers=1"),
            *(f"--batch_size={actors}", "--learning_rate=0.001", "--normalise_returns"),
            *("--reward_clipping=none", *family.flags),
        ]
        said = _output(command, Path(folder), seconds)
        run = Path(folder, "x")
        rows = [*read_logs(run)] if (run / "logs.csv").exists() else []
    if len(rows) > 1:
        return _change(rows, actors)
    print(said)
    return "slow" if "SIGINT" in said else "fails"


def _output(command: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs a program until so long after its first update; returns what it printed."""
    output, log = folder / "output.txt", folder / "x" / "logs.csv"
    here = Path(__file__).resolve().parent  # it contains the module `families`
    found = [str(here.parent), str(here), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
    with output.open("w") as file:
        run = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    end, is_learning = time.monotonic() + _PATIENCE_S, False
    while run.poll() is None and time.monotonic() < end:
        time.sleep(0.2)
        if not is_learning and log.exists() and len(log.read_text().splitlines()) > 1:
            end, is_learning = time.monotonic() + seconds, True
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
    run.wait()
    return output.read_text()


def _change(rows: Sequence[dict[str, float]], actors: int) -> str:
    """Returns the mean returns of 20 early and the last 20 updates with an episode (or a fifth),
    in bold if the last is higher by three standard errors.

    Updates before an environment could end the longest episode do not count: the episodes that have
    ended by then are the short ones.
    """
    ended = [row for row in rows if "mean_episode_return" in row]
    longest = max((row["mean_episode_length"] for row in ended), default=0.0)
    found = [row["mean_episode_return"] for row in ended if row["step"] >= actors * longest]
    if (count := min(20, len(found) // 5)) < 5:
        return ""
    parts = found[:count], found[-count:]
    first, last = map(statistics.fmean, parts)
    error = math.sqrt(sum(statistics.variance(part) / count for part in parts))
    told = f"{first:.4g} → {last:.4g}"
    return f"**{told}**" if last - first > 3 * error else told


_PATIENCE_S = 60.0  # for the first update
_HEAD = """\
# Tested environments

One environment of each family. `[minigrid]` stands for `pip install 'torchbeast[minigrid]'`, other
names for packages, of which the newest releases of 2026-11-27 ran. *Zoo*: tuned settings, results.

*Returns*: PPO's, early and after 45 seconds (Gymnasium-Robotics and DM Control: 30) on one busy
core, with the same settings everywhere (`--learning_rate 0.001 --normalise_returns
--reward_clipping none`), if enough episodes ended. **Bold** returns rose by more than three
standard errors.

| environment | install | returns | zoo |
| --- | --- | --- | --- |"""
_NOTES = """
* MiniGrid needs `--observation_keys image direction`, `gymnasium:make_vec` arguments, such as
  `--env_kwargs '{"id": "Acrobot-v1"}'`. POPGym ran with `--use_lstm`.
* DQN needs a smaller `--replay_size` for ViZDoom and Butterfly, whose images are large.
* `[robotics]` and `[dm-control]` install MuJoCo 3, because these packages fail with MuJoCo 4.
* The module `families` is `benchmarks/families.py`, which writes this page.
* *slow*: no update within a minute. *fails*: EnvPool's Procgen needs system libraries.
"""


def _page(returns: Mapping[str, str]) -> str:
    rows = []
    for family in FAMILIES:
        install = f"`{family.install}`" if family.install else ""
        cells = f"`{family.env}`", install, returns.get(family.env, ""), _link(family)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([_HEAD, *rows, _NOTES])


def _link(family: Family) -> str:
    """Returns the link to its section of the zoo, or to the page if no run is kept yet."""
    zoo = ZOO.read_text()
    if not family.zoo or family.zoo not in zoo:
        return ""
    anchor = f"#{family.zoo.lower().replace(' ', '-')}" if f"## {family.zoo}\n" in zoo else ""
    return f"[zoo](../results/zoo.md{anchor})"


if __name__ == "__main__":
    main()
