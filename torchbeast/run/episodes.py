# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes to measure an agent: for `Learner.evaluate`, evaluations during training,
and `--mode test`; and the score of an agent of many tasks.

Each environment plays its own share of the episodes, because counting the first N episodes that end
in any environment would favour short ones.

In a deterministic environment, greedy actions repeat the same episode: games of Pong that start a
few frames later are identical from the first ball on. An evaluation therefore counts distinct
episodes, and may start each episode with random actions.
"""

from __future__ import annotations

import collections
import csv
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbeast.collect.config import split_evenly
from torchbeast.core.actors.contract import Agent, Mode
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.base.checks import counted
from torchbeast.core.base.computing import one_thread
from torchbeast.core.base.nest import Nest, flatten, map_leaves2
from torchbeast.core.envs.contract import MASK, is_reset
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.tasks import num_tasks, tasks_in
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvSpec, game_of, plays_atari
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.waiting import say
from torchbeast.seeds import seed_of
from torchbeast.zoo import ATARI_SCORES

MAX_PARALLEL = 8
COMPARED_STEPS = 100  # number of last steps that are compared to find distinct episodes
MAX_EPISODE_STEPS = 500_000  # env steps; the longest Atari game has 27,000, of 108,000 frames
_MOST_IDLE_STEPS = 50_000  # of an agent that waits for the next game
_SAY_S = 8.0  # between two progress messages
_ATARI_RANDOM_START = 30  # the usual number of no-ops in the literature


class TaskScores:
    """The score of an agent of many tasks: the mean of its normalised mean returns in each.

        (return - low) / (high - low)      low and high are given, by task_returns
        the same, but at most 1            Atari games: random play and a human, and the score is
                                           the mean capped human-normalised score of Espeholt et
                                           al. 2018
        return                             unless all tasks are Atari games

    Attributes:
        names: Of the tasks, by their numbers.
    """

    def __init__(self, env: EnvSpec) -> None:
        """Takes the tasks and the task_returns of an environment."""
        self.names = env.task_names
        pairs = iter(env.options.task_returns)
        self._ranges = list(zip(pairs, pairs, strict=False))
        self._limit = float("inf")
        if not self._ranges:
            with ATARI_SCORES.open(encoding="utf-8") as file:
                of_games = {
                    row["game"].replace("_", ""): (float(row["random"]), float(row["human"]))
                    for row in csv.DictReader(file)
                }
            games = [game_of(name).lower() for name in self.names]
            if all(game in of_games for game in games):
                self._ranges, self._limit = [of_games[game] for game in games], 1.0

    def __call__(self, returns: Mapping[int, float]) -> float:
        """Returns the score.

        Args:
            returns: Mean returns by the numbers of tasks, at least one.
        """
        return statistics.fmean(self._score(task, mean) for task, mean in returns.items())

    def _score(self, task: int, mean: float) -> float:
        if not self._ranges:
            return mean
        low, high = self._ranges[task]
        return min(self._limit, (mean - low) / (high - low))


class Episodes(NamedTuple):
    """Whole episodes, in the order in which they ended.

    Attributes:
        returns: The sums of rewards.
        lengths: Environment steps.
        endings: Hashes of the last COMPARED_STEPS steps, which distinguish episodes.
        tasks: The numbers of their tasks.
        scores: Of an agent of several tasks; None: there is one.
    """

    returns: list[float]
    lengths: list[int]
    endings: list[int]
    tasks: Sequence[int] = ()
    scores: TaskScores | None = None

    @property
    def mean(self) -> float:
        """The mean return; with several tasks, the score of the mean returns of each."""
        if self.scores is None:
            return statistics.fmean(self.returns or [math.nan])
        return self.scores(self._by_task())

    def task_means(self) -> dict[str, float]:
        """Returns the mean return of each task that was played, by name; {} with one task."""
        if self.scores is None:
            return {}
        return {self.scores.names[task]: mean for task, mean in sorted(self._by_task().items())}

    def _by_task(self) -> dict[int, float]:
        """Returns the mean return of each task that was played, by its number."""
        returns: dict[int, list[float]] = {}
        for task, value in zip(self.tasks, self.returns, strict=False):
            returns.setdefault(task, []).append(value)
        return {task: statistics.fmean(of_task) for task, of_task in returns.items()}

    def __repr__(self) -> str:
        mean, length = self.mean, statistics.fmean(self.lengths or [math.nan])
        count = counted(len(self.returns), "episode")
        if self.scores is not None:
            return f"<{count}: score {mean:.3f}, mean length {length:.0f}>"
        return f"<{count}: mean return {mean:.2f} ± {self.spread:.2f}, mean length {length:.0f}>"

    @property
    def spread(self) -> float:
        """The standard deviation of the returns; 0 with a single episode."""
        return statistics.stdev(self.returns) if len(self.returns) > 1 else 0.0

    @property
    def distinct(self) -> int:
        """The number of episodes that differ in their return or last steps.

        Episodes that only start a few frames later than others do not count as distinct.
        """
        return len(set(zip(self.returns, self.endings, strict=True)))


class RandomStarts:
    """Starts each episode with a random number of random actions, from 0 to `most`."""

    def __init__(self, env: VecEnv, most: int, seed: int) -> None:
        self._env, self._most = env, most
        self._rng = np.random.default_rng(seed)
        self._left = self._before = self._draw()

    def _draw(self) -> np.ndarray:
        return self._rng.integers(0, self._most + 1, self._env.num_envs)

    def replace(self, action: Nest[Tensor]) -> Nest[Tensor]:
        """Returns actions [1, E, ...], with random actions for episodes that have just started."""
        starting, self._before = self._left > 0, self._left
        if not starting.any():
            return action
        self._left = self._left - starting
        drawn = random_action(self._env.action_space, self._env.num_envs, self._rng)

        def mixed(leaf: Tensor, random: np.ndarray) -> Tensor:
            mask = torch.from_numpy(starting).view(1, -1, *[1] * (leaf.ndim - 2))
            return torch.where(mask, torch.as_tensor(random, dtype=leaf.dtype)[None], leaf)

        return map_leaves2(mixed, action, drawn)

    def count(self, episode_end: np.ndarray, ignored: np.ndarray | bool = False) -> None:
        """Draws a new number of random actions for ended episodes; episode_end: bool [E].

        ignored: bool [E], whether the environment ignored its action, which then does not count.
        """
        left = np.where(ignored, self._before, self._left)
        self._left = np.where(episode_end, self._draw(), left)


class Endings:
    """Checksums of the last steps of the running episodes."""

    def __init__(self, num_envs: int) -> None:
        self._steps = [collections.deque[int](maxlen=COMPARED_STEPS) for _ in range(num_envs)]

    def add(
        self, observation: Any, action: Nest[Tensor], reward: np.ndarray, ignored: np.ndarray
    ) -> None:
        """Adds a step: observation [E, ...], action [1, E, ...] and reward [E]; not where the
        environment ignored its action, bool [E].
        """
        leaves = [*flatten(observation), *(leaf[0].numpy() for leaf in flatten(action)), reward]
        for index in np.flatnonzero(~ignored).tolist():
            crc32 = zlib.crc32(b"".join(leaf[index].tobytes() for leaf in leaves))
            self._steps[index].append(crc32)

    def take(self, index: int) -> int:
        """Returns and clears the checksum of environment `index`'s episode."""
        ending = hash(tuple(self._steps[index]))
        self._steps[index].clear()
        return ending


def parallel_envs(num_episodes: int, num_agents: int) -> int:
    """Returns the number of environments that play the episodes: of whole games."""
    return math.ceil(min(num_episodes, MAX_PARALLEL) / num_agents) * num_agents


def of_whole_games(start: Callable[[int], EnvProcess], num_episodes: int) -> EnvProcess:
    """Returns environments that play the episodes; start: makes a number of environments."""
    env = start(parallel_envs(num_episodes, 1))
    multiple = getattr(env, "num_agents", 1) * num_tasks(env.observation_space)
    num_envs = parallel_envs(num_episodes, multiple)
    if num_envs == env.num_envs:
        return env
    env.close()
    return start(num_envs)


Watcher = Callable[[Any], object]
"""Receives every observation of an evaluation, a nest of arrays [E, ...], e.g. for a video."""


def usual_random_start(env: VecEnv) -> int:
    """Returns the most random actions before an episode: 30 in Atari games, which are
    deterministic, else 0.
    """
    return _ATARI_RANDOM_START if plays_atari(env.env_id) else 0


def play(
    env: VecEnv,
    agent: Agent,
    num_episodes: int,
    seed: int,
    watch: Watcher | None = None,
    greedy: bool = True,
    random_start: int | None = None,
) -> Episodes:
    """Plays `num_episodes` whole episodes of each task, `env.num_envs` of them at a time.

    The caller's random numbers and torch's number of threads are the same afterwards. Prints
    progress messages. Agents that do not play any more leave their episodes out. Raises RunError if
    an episode takes more than MAX_EPISODE_STEPS, and UsageError if random actions may be illegal.

    greedy: take the most likely actions; False: sample with torch's random generator.
    random_start: start each episode with 0 to this many random actions; None: usual_random_start.
    """
    most = usual_random_start(env) if random_start is None else random_start
    if most and getattr(agent.model, "action_mask", None) is not None:
        raise UsageError(f"random_start {most} would take actions that {MASK} forbids: use 0")
    starts = RandomStarts(env, most, seed_of(seed, "random starts"))
    # Batches are small, so more threads would mostly wait.
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of sampled actions
        loop = EnvLoop(env, agent.model, seed)
        return _play(env, loop, starts, num_episodes, "greedy" if greedy else "sample", watch)


def _play(
    env: VecEnv,
    loop: EnvLoop,
    starts: RandomStarts,
    num_episodes: int,
    mode: Mode,
    watch: Watcher | None,
) -> Episodes:
    of_envs, of_episodes, scores = np.zeros(env.num_envs, int), list[int](), None
    if num_tasks(env.observation_space) > 1:
        scores = TaskScores(getattr(env, "spec", EnvSpec(env.env_id)))
        of_envs = tasks_in(loop.row.observation)
    played, endings = Episodes([], [], [], of_episodes, scores), Endings(env.num_envs)
    left = np.zeros(env.num_envs, int)
    playing = env.num_envs - env.num_envs % getattr(env, "num_agents", 1)  # the others are idle
    left[:playing] = _shares(of_envs[:playing], num_episodes)
    wanted = left.sum()
    say_at, idle = time.monotonic() + _SAY_S, np.zeros(env.num_envs, int)
    while left.any():
        if watch is not None:
            watch(loop.row.observation)
        loop.act(mode)
        loop.acted = loop.acted._replace(action=starts.replace(loop.acted.action))
        seen = loop.row.observation
        loop.step()
        ignored = is_reset(loop.row.done, loop.row.episode_step)
        endings.add(seen, loop.acted.action, loop.row.reward, ignored)
        starts.count(loop.row.episode_end, ignored)
        ended = {
            index: endings.take(index) for index in np.flatnonzero(loop.row.episode_end).tolist()
        }
        counted = loop.row.episode_end & (left > 0)
        played.returns.extend(loop.row.episode_return[counted].tolist())
        played.lengths.extend(loop.row.episode_step[counted].tolist())
        played.endings.extend(ended[index] for index in np.flatnonzero(counted).tolist())
        of_episodes.extend(of_envs[counted].tolist())
        left -= counted
        idle = np.where(ignored, idle + 1, 0)
        if left.any() and len(played.returns) and (idle[left > 0] > _MOST_IDLE_STEPS).all():
            say(f"Left out {left.sum()} episodes of agents that do not play.")
            break
        longest = int(loop.row.episode_step[left > 0].max(initial=0))
        if longest > MAX_EPISODE_STEPS:
            raise RunError(
                f"{env.env_id}: an episode has not ended within {MAX_EPISODE_STEPS:,} steps: set a "
                "time limit, for example max_episode_steps of gymnasium.make"
            )
        if time.monotonic() >= say_at:
            say(
                f"{len(played.returns)} of {wanted} episodes have ended; the longest running "
                f"one is at step {longest:,}."
            )
            say_at = time.monotonic() + _SAY_S
    return played


def _shares(tasks: np.ndarray, num_episodes: int) -> np.ndarray:
    """Returns how many of each task's episodes its environments play; tasks: of each [E]."""
    shares = np.zeros(len(tasks), int)
    for task in np.unique(tasks):
        (players,) = np.nonzero(tasks == task)
        shares[players] = split_evenly(num_episodes, len(players))
    return shares
