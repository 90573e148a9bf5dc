# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes with a checkpoint, greedily, and reports their returns.

The environment runs in this process. Each of E environments plays its own share of the episodes:
counting the first N that end anywhere would favour short ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchbeast.core.actors.actor_critic import ModelInputs
from torchbeast.core.actors.policy import act
from torchbeast.core.envs.frame_stack import FrameStacker
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.nest_py import map_leaves
from torchbeast.runtime.agent import Agent

MAX_PARALLEL = 8


class Watcher(Protocol):
    """Sees every observation of an evaluation, such as a video writer."""

    def __call__(self, observation: Any) -> None:
        """observation: nest of arrays `[E, ...]`."""


class Step(NamedTuple):
    """What the policy is asked about: arrays `[E, ...]`."""

    observation: Any
    reward: np.ndarray
    done: np.ndarray
    episode_end: np.ndarray


def play(
    env: VecEnv, agent: Agent, num_episodes: int, seed: int, watch: Watcher | None = None
) -> list[float]:
    """The returns of `num_episodes` whole episodes, with `env.num_envs` of them at a time."""
    left = np.array([len(share) for share in np.array_split(range(num_episodes), env.num_envs)])
    returns: list[float] = []
    total = np.zeros(env.num_envs)
    for step in _steps(env, agent, seed):
        total += step.reward
        if watch is not None:
            watch(step.observation)
        counted = step.episode_end & (left > 0)
        returns += total[counted].tolist()
        left -= counted
        total[step.episode_end] = 0
        if not left.any():
            break
    return returns


def report(returns: list[float]) -> str:
    """The returns and their mean, median and spread, in words."""
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    each = ", ".join(f"{value:g}" for value in returns)
    return (
        f"Returns: {each}\n"
        f"Mean {statistics.fmean(returns):.2f}, median {statistics.median(returns):.2f}, "
        f"standard deviation {spread:.2f} over {len(returns)} episodes."
    )


def _steps(env: VecEnv, agent: Agent, seed: int) -> Iterator[Step]:
    """Steps without end, from the first observation on."""
    stacker, count = FrameStacker(env.frame_stack), env.num_envs
    nothing = np.zeros(count, dtype=bool)
    step = Step(stacker.reset(env.reset(seed)), np.zeros(count, np.float32), ~nothing, nothing)
    core_state = agent.model.initial_state(count)
    action = agent.distribution.zero_action((1, count))
    while True:
        yield step
        (action, _, _), core_state = act(
            agent.model, agent.distribution, _inputs(step, action), core_state, greedy=True
        )
        result = env.step(map_leaves(lambda leaf: leaf[0].numpy(), action))
        done = result.terminated | result.truncated
        observation = stacker.push(result.observation, done)
        step = Step(observation, result.reward, done, result.episode_end)


def _inputs(step: Step, last_action: Any) -> ModelInputs:
    """Tensors `[1, E, ...]`."""
    return ModelInputs(
        map_leaves(_row, step.observation), _row(step.reward), _row(step.done), last_action
    )


def _row(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))[None]
