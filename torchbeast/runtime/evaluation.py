# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes with a checkpoint and reports their returns.

The environment runs in this process. Each of E environments plays its own share of the episodes:
counting the first N that end anywhere would favour short ones.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.runtime.agent import Agent

MAX_PARALLEL = 8


class Episodes(NamedTuple):
    """Whole games, in the order in which they ended."""

    returns: list[float]
    lengths: list[int]  # steps


class Watcher(Protocol):
    """Sees every observation of an evaluation, such as a video writer."""

    def __call__(self, observation: Any) -> None:
        """observation: nest of arrays `[E, ...]`."""


def play(
    env: VecEnv,
    agent: Agent,
    num_episodes: int,
    seed: int,
    watch: Watcher | None = None,
    greedy: bool = True,
) -> Episodes:
    """Plays `num_episodes` whole games, `env.num_envs` of them at a time.

    greedy: the policy's most likely actions; else samples, from torch's generator.
    """
    left = np.array([len(share) for share in np.array_split(range(num_episodes), env.num_envs)])
    played = Episodes([], [])
    loop = EnvLoop(env, agent.distribution, agent.model.initial_state(env.num_envs), seed)
    while left.any():
        if watch is not None:
            watch(loop.row.observation)
        loop.act(agent.model, greedy)
        loop.step()
        counted = loop.row.episode_end & (left > 0)
        played.returns.extend(loop.row.episode_return[counted].tolist())
        played.lengths.extend(loop.row.episode_step[counted].tolist())
        left -= counted
    return played


def report(episodes: Episodes) -> str:
    """The returns, their mean, median and spread, and the lengths, in words."""
    returns, lengths = episodes
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    each = ", ".join(f"{value:g}" for value in returns)
    return (
        f"Returns: {each}\n"
        f"Mean {statistics.fmean(returns):.2f}, median {statistics.median(returns):.2f}, "
        f"standard deviation {spread:.2f} over {len(returns)} episodes.\n"
        f"Lengths: mean {statistics.fmean(lengths):.0f} steps, "
        f"from {min(lengths):,} to {max(lengths):,}."
    )
