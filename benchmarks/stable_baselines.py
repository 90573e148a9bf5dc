# SPDX-License-Identifier: Apache-2.0
"""Compares PPO in one process with Stable-Baselines3's: steps/s that are collected and learnt from.

Both have 8 environments, 128 steps of each in a batch, and four epochs of four minibatches. For
CartPole, TorchBeast has layers of 128 and 64 units, Stable-Baselines3 two layers of 64 for policy
and value each. For Pong both have the three convolutions of the original DQN. TorchBeast chooses
its number of threads. Each run is a process of its own, and the runs are interleaved. Needs
`pip install stable-baselines3`, and for Pong `opencv-python`.

python benchmarks/stable_baselines.py [--games cartpole pong] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import interleaved, print_table, write_json

from torchbeast import Learner, make_env
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.algos import PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.schemes import Scheme

NUM_ENVS, STEPS, PARTS, EPOCHS = 8, 128, 4, 4
BATCH = NUM_ENVS * STEPS
NEVER = 10**9  # steps: no run gets there
GAMES = {"cartpole": "CartPole-v1", "pong": "PongNoFrameskip-v4"}
WARM_UP_S = 3.0

Updates = Iterator[None]  # each next() collects a batch and learns from it


def main() -> None:
    arguments = _arguments()
    if arguments.only:
        print(_steps_per_second(SIDES[arguments.only](arguments), arguments.seconds))
        return
    found = {}
    for game in arguments.games:
        runs = {side: functools.partial(_in_process, side, game, arguments) for side in SIDES}
        found[game] = interleaved(runs, arguments.repeats)
        print(GAMES[game])
        print_table(found[game], "steps/s")
    write_json(arguments.json, arguments, steps_per_second=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--threads", type=int, default=1, help="of Stable-Baselines3")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds")
    parser.add_argument("--json", type=Path, help="also write machine, settings and figures")
    parser.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(side: str, game: str, arguments: argparse.Namespace) -> float:
    settings = ["--threads", str(arguments.threads), "--seconds", str(arguments.seconds)]
    command = [sys.executable, __file__, "--only", side, "--games", game, *settings]
    return float(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1])


def _steps_per_second(updates: Updates, seconds: float) -> float:
    """Returns the steps of a second after the first update and the warm-up, in whole updates."""
    next(updates)
    _run(updates, WARM_UP_S)
    return _run(updates, seconds)


def _run(updates: Updates, seconds: float) -> float:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(updates)
        count += 1
    return count * BATCH / (time.perf_counter() - began)


def _torchbeast(arguments: argparse.Namespace) -> Updates:
    [game] = arguments.games
    network: tuple[Any, ...] = ("mlp", {"hidden": 64}) if game == "cartpole" else ("shallow",)
    return ppo_updates(GAMES[game], NUM_ENVS, *network)


def ppo_updates(env: str, num_envs: int, *network: Any) -> Updates:
    """Yields after each batch that PPO in one process has collected and learnt from."""
    envs, action_space, obs_space = VecEnv.create_factory(
        env_fn=make_env, env_kwargs={"env": env}, vec_env_size=num_envs
    )
    scheme = Scheme(
        train_envs_factory=envs,
        actor_factory=OnPolicyActorCritic.create_factory(obs_space, action_space, *network),
        algo_factory=PPO.create_factory(num_epochs=EPOCHS, num_mini_batch=PARTS),
        storage_factory=OnPolicyGAEBuffer.create_factory(size=STEPS, batch_size=num_envs),
    )
    with (
        tempfile.TemporaryDirectory(prefix="torchbeast-compared-") as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Learner(scheme, NEVER, Path(folder) / "run", seed=1) as learner,
    ):
        while True:
            learner.step()
            yield


def _stable_baselines(arguments: argparse.Namespace) -> Updates:
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO as TheirPPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    [game] = arguments.games
    torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)
    if game == "cartpole":
        policy, envs = "MlpPolicy", make_vec_env(GAMES[game], NUM_ENVS, seed=1)
    else:
        policy, envs = "CnnPolicy", VecFrameStack(make_atari_env(GAMES[game], NUM_ENVS, seed=1), 4)
    model = TheirPPO(
        policy,
        envs,
        n_steps=STEPS,
        batch_size=BATCH // PARTS,
        n_epochs=EPOCHS,
        ent_coef=0.01,
        device="cpu",
        seed=1,
    )
    while True:
        model.learn(BATCH, reset_num_timesteps=False)
        yield


SIDES: dict[str, Callable[[argparse.Namespace], Updates]] = {
    "TorchBeast": _torchbeast,
    "Stable-Baselines3": _stable_baselines,
}


if __name__ == "__main__":
    main()
