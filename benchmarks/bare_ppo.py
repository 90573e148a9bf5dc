# SPDX-License-Identifier: Apache-2.0
"""CPU time of a step of PPO on CartPole, compared with a loop of torch and Gymnasium alone.

The bare loop has the arithmetic of PPO and nothing else: no logs, no checks, no checkpoints, no
truncation, no normalised observations, no last action and reward as inputs. Both have one thread,
128 steps of each environment in a batch, four epochs of four minibatches, and layers of 128 and 64
units. Runs are interleaved.

python benchmarks/bare_ppo.py [--num_envs 8 256] [--seconds 10] [--profile]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import pstats
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from figures import interleaved, print_table, write_json
from stable_baselines import EPOCHS, PARTS, STEPS, Updates, ppo_updates
from torch import nn
from torch.distributions import Categorical

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def main() -> None:
    arguments = _arguments()
    if arguments.only:
        print(_microseconds(SIDES[arguments.only](arguments.num_envs[0]), arguments))
        return
    found = {}
    for size in arguments.num_envs:
        runs = {side: functools.partial(_in_process, side, size, arguments) for side in SIDES}
        found[str(size)] = interleaved(runs, arguments.repeats)
        print(f"{size} environments")
        print_table(found[str(size)], "us of CPU a step")
    write_json(arguments.json, arguments, microseconds=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_envs", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3, help="number of rounds")
    parser.add_argument("--json", type=Path, help="also write machine, settings and figures")
    parser.add_argument("--profile", action="store_true", help="with --only: print a profile")
    parser.add_argument("--only", choices=SIDES, help="run one side in this process")
    return parser.parse_args()


def _in_process(side: str, size: int, arguments: argparse.Namespace) -> float:
    settings = ["--num_envs", str(size), "--seconds", str(arguments.seconds)]
    command = [sys.executable, __file__, "--only", side, *settings]
    return float(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1])


def _microseconds(updates: Updates, arguments: argparse.Namespace) -> float:
    """Returns the CPU time of a step in microseconds, after two updates of warm-up."""
    next(updates)
    next(updates)
    began, end, count = time.process_time(), time.monotonic() + arguments.seconds, 0
    profile = cProfile.Profile()
    with profile if arguments.profile else contextlib.nullcontext():
        while time.monotonic() < end:
            next(updates)
            count += 1
    spent = time.process_time() - began
    if arguments.profile:
        pstats.Stats(profile, stream=sys.__stdout__).sort_stats("tottime").print_stats(45)
    return spent / (count * STEPS * arguments.num_envs[0]) * 1e6


def _torchbeast(num_envs: int) -> Updates:
    return ppo_updates("CartPole-v1", num_envs, "mlp", {"hidden": 64})


def _bare(num_envs: int) -> Updates:
    torch.set_num_threads(1)
    envs = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(num_envs)]
    net = nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=0.00025, eps=1e-5)
    observed = torch.from_numpy(np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)]))
    while True:
        seen, taken, log_probs, rewards, dones, values = [], [], [], [], [], []
        for _ in range(STEPS):
            with torch.no_grad():
                out = net(observed)
                policy: Any = Categorical(logits=out[:, :2])
                action = policy.sample()
            seen.append(observed)
            taken.append(action)
            log_probs.append(policy.log_prob(action))
            values.append(out[:, 2])
            rows, gained, ended = [], [], []
            for env, chosen in zip(envs, action.tolist(), strict=True):
                row, reward, terminated, truncated, _ = env.step(chosen)
                if terminated or truncated:
                    row = env.reset()[0]
                rows.append(row)
                gained.append(reward)
                ended.append(terminated or truncated)
            observed = torch.from_numpy(np.stack(rows))
            rewards.append(torch.tensor(gained, dtype=torch.float32))
            dones.append(torch.tensor(ended, dtype=torch.float32))
        with torch.no_grad():
            following = net(observed)[:, 2]
        advantages: list[torch.Tensor] = []
        advantage = torch.zeros(num_envs)
        for t in reversed(range(STEPS)):
            goes_on = GAMMA * (1.0 - dones[t])
            advantage = rewards[t] + goes_on * following - values[t] + LAMBDA * goes_on * advantage
            following = values[t]
            advantages.insert(0, advantage)
        batch = [torch.cat(each) for each in (seen, taken, log_probs, advantages, values)]
        for _ in range(EPOCHS):
            for which in torch.randperm(STEPS * num_envs).chunk(PARTS):
                _learn(net, optimiser, *(each[which] for each in batch))
        yield


def _learn(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    seen: torch.Tensor,
    taken: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    old_values: torch.Tensor,
) -> None:
    """Takes an optimiser step on a minibatch [N, ...]."""
    targets = advantages + old_values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    out = net(seen)
    policy: Any = Categorical(logits=out[:, :2])
    ratio = (policy.log_prob(taken) - old).exp()
    clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    loss = loss + 0.25 * (out[:, 2] - targets).square().mean() - 0.01 * policy.entropy().mean()
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 40.0)
    optimiser.step()


SIDES = {"torchbeast": _torchbeast, "bare": _bare}


if __name__ == "__main__":
    main()
