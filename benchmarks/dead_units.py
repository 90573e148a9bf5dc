# SPDX-License-Identifier: Apache-2.0
"""Counts the units of a trained network's joint layer that no observation activates.

A unit whose input is negative for every observation gets no gradient, and stays dead.

usage: PYTHONPATH=. python benchmarks/dead_units.py RUN [RUN ...]

Plays 16 environments of each run for 150 steps with sampled actions, and prints the share of dead
units, and the rank that keeps 99 % of the features' singular values. The network must be a
built-in actor-critic.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchbeast
from torchbeast.run.checkpoint import load_newest

ENVS, STEPS = 16, 150


def activations(run: Path) -> Tensor:
    """Returns the joint layer's inputs of its ReLU, [STEPS * ENVS, units]."""
    agent = torchbeast.load_agent(run)
    model: Any = agent.agent.model
    seen: list[Tensor] = []
    layer = model.fc if isinstance(model.norm, nn.Identity) else model.norm
    layer.register_forward_hook(lambda module, given, output: seen.append(output.float().clone()))
    flags = load_newest(run / "model.tar").checkpoint["flags"]
    with closing(torchbeast.make_env(flags["env"], ENVS)) as env:
        observation, reward, done = env.reset(seed=3), None, False
        for _ in range(STEPS):
            action = agent.act(observation, reward, done, sampled=True)
            step: Any = env.step(action)
            observation, reward, done = step.observation, step.reward, step.episode_end
    return torch.cat(seen)


def main() -> None:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    for run in parser.parse_args().runs:
        inputs = activations(run)
        dead = (inputs <= 0).all(0).float().mean().item()
        features = inputs.relu()
        values = torch.linalg.svdvals(features - features.mean(0))
        rank = int((values.cumsum(0) < 0.99 * values.sum()).sum()) + 1
        print(f"{run.name}: {dead:.0%} of {inputs.shape[1]} units dead, rank {rank}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
