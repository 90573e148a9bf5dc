# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes with a checkpoint and reports their returns: `--mode test`, `test_render`.

Each environment plays its own share of the episodes, because counting the first N episodes that end
in any environment would favour short ones.

In a deterministic environment, greedy actions repeat the same episode: games of Pong that start a
few frames later are identical from the first ball on. An evaluation therefore counts distinct
episodes, and may start each episode with random actions.

Checkpoints of TorchBeast 2019 can be evaluated too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import secrets
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import Agent, make_agent
from torchbeast.core.base.checks import counted
from torchbeast.core.base.computing import one_thread
from torchbeast.core.base.nest import Nest, flatten, map_leaves2
from torchbeast.core.base.specs import SpecError
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.atari import plays_atari
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE, RunError, UsageError, what_it_raised
from torchbeast.fleets.child_process import show_output
from torchbeast.reporting.run_folder import CHECKPOINT
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import UNKNOWN, EvaluationConfig, check_named
from torchbeast.seeds import seed_of

MAX_PARALLEL = 8
COMPARED_STEPS = 100  # number of last steps that are compared to find distinct episodes
MAX_EPISODE_STEPS = 500_000  # env steps; the longest Atari game has 27,000, of 108,000 frames
_SAY_S = 8.0  # between two progress messages


class Episodes(NamedTuple):
    """Whole episodes, in the order in which they ended.

    Attributes:
        returns: The sums of rewards.
        lengths: Environment steps.
        endings: Hashes of the last COMPARED_STEPS steps, which distinguish episodes.
    """

    returns: list[float]
    lengths: list[int]
    endings: list[int]

    def __repr__(self) -> str:
        mean, length = (statistics.fmean(of or [math.nan]) for of in self[:2])
        count = counted(len(self.returns), "episode")
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
        self._left = self._draw()

    def _draw(self) -> np.ndarray:
        return self._rng.integers(0, self._most + 1, self._env.num_envs)

    def replace(self, action: Nest[Tensor]) -> Nest[Tensor]:
        """Returns actions [1, E, ...], with random actions for episodes that have just started."""
        starting = self._left > 0
        if not starting.any():
            return action
        self._left -= starting
        drawn = random_action(self._env.action_space, self._env.num_envs, self._rng)

        def mixed(leaf: Tensor, random: np.ndarray) -> Tensor:
            mask = torch.from_numpy(starting).view(1, -1, *[1] * (leaf.ndim - 2))
            return torch.where(mask, torch.as_tensor(random, dtype=leaf.dtype)[None], leaf)

        return map_leaves2(mixed, action, drawn)

    def count(self, episode_end: np.ndarray) -> None:
        """Draws a new number of random actions for ended episodes; episode_end: bool [E]."""
        self._left = np.where(episode_end, self._draw(), self._left)


class Endings:
    """Checksums of the last steps of the running episodes."""

    def __init__(self, num_envs: int) -> None:
        self._steps = [collections.deque[int](maxlen=COMPARED_STEPS) for _ in range(num_envs)]

    def add(self, observation: Any, action: Nest[Tensor], reward: np.ndarray) -> None:
        """Adds a step: observation [E, ...], action [1, E, ...] and reward [E]."""
        leaves = [*flatten(observation), *(leaf[0].numpy() for leaf in flatten(action)), reward]
        for index, steps in enumerate(self._steps):
            steps.append(zlib.crc32(b"".join(leaf[index].tobytes() for leaf in leaves)))

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
    num_envs = parallel_envs(num_episodes, getattr(env, "num_agents", 1))
    if num_envs == env.num_envs:
        return env
    env.close()
    return start(num_envs)


Watcher = Callable[[Any], object]
"""Receives every observation of an evaluation, a nest of arrays [E, ...], e.g. for a video."""


def play(
    env: VecEnv,
    agent: Agent,
    num_episodes: int,
    seed: int,
    watch: Watcher | None = None,
    greedy: bool = True,
    random_start: int = 0,
) -> Episodes:
    """Plays `num_episodes` whole episodes, `env.num_envs` of them at a time.

    Prints progress messages. Raises RunError if an episode takes more than MAX_EPISODE_STEPS.

    greedy: take the most likely actions; False: sample with torch's random generator.
    random_start: start each episode with 0 to this many random actions.
    """
    left = np.array([len(share) for share in np.array_split(range(num_episodes), env.num_envs)])
    played = Episodes([], [], [])
    starts = RandomStarts(env, random_start, seed_of(seed, "random starts"))
    endings = Endings(env.num_envs)
    loop = EnvLoop(env, agent.model, seed)
    say_at = time.monotonic() + _SAY_S
    while left.any():
        if watch is not None:
            watch(loop.row.observation)
        loop.act("greedy" if greedy else "sample")
        loop.acted = loop.acted._replace(action=starts.replace(loop.acted.action))
        seen = loop.row.observation
        loop.step()
        endings.add(seen, loop.acted.action, loop.row.reward)
        starts.count(loop.row.episode_end)
        ended = {
            index: endings.take(index) for index in np.flatnonzero(loop.row.episode_end).tolist()
        }
        counted = loop.row.episode_end & (left > 0)
        played.returns.extend(loop.row.episode_return[counted].tolist())
        played.lengths.extend(loop.row.episode_step[counted].tolist())
        played.endings.extend(ended[index] for index in np.flatnonzero(counted).tolist())
        left -= counted
        longest = int(loop.row.episode_step[left > 0].max(initial=0))
        if longest > MAX_EPISODE_STEPS:
            raise RunError(
                f"{env.env_id}: an episode has not ended within {MAX_EPISODE_STEPS:,} steps: give "
                "the environment a time limit, for example max_episode_steps of gymnasium.make"
            )
        if time.monotonic() >= say_at:
            print(
                f"{len(played.returns)} of {num_episodes} episodes have ended; the longest running "
                f"one is at step {longest:,}.",
                flush=True,
            )
            say_at = time.monotonic() + _SAY_S
    return played


def report(episodes: Episodes) -> str:
    """Describes returns, lengths and the number of distinct episodes in words."""
    returns, lengths, _ = episodes
    each = ", ".join(f"{value:g}" for value in returns)
    return (
        f"Returns: {each}\n"
        f"Mean {statistics.fmean(returns):.2f}, median {statistics.median(returns):.2f}, "
        f"standard deviation {episodes.spread:.2f} over {len(returns)} episodes.\n"
        f"Lengths: mean {statistics.fmean(lengths):.0f} steps, "
        f"from {min(lengths):,} to {max(lengths):,}.\n"
        f"{episodes.distinct} of {counted(len(returns), 'episode')} unique"
    )


_ATARI_RANDOM_START = 30  # the usual number of no-ops in the literature
ENV_OF_THE_RUN = EnvSpec("")
NEEDED = ("model_state_dict", "flags")
"""The keys that a checkpoint needs for an evaluation."""


class EpisodePlayer:
    """Plays with the weights of checkpoints of one run. One thread uses it."""

    def __init__(
        self,
        saved: Mapping[str, Any],
        path: Path,
        config: EvaluationConfig,
        asked: EnvSpec = ENV_OF_THE_RUN,
        *,
        seed: int | None = None,
        film: bool = False,
        check_goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the environments, and makes the agent with the weights of a checkpoint.

        saved: the checkpoint; path: its file, for messages.
        asked: the environment; name and options of the training environment are the defaults.
        seed: of every evaluation; None: a random seed.
        film: use a single environment, which renders itself if it can.
        check_goes_on: raises an exception to stop waiting for the environments.
        """
        self._config = config
        self._seed = secrets.randbits(31) if seed is None else seed
        self._trained_on = checkpoints.env_spec(saved).name
        spec = env_of(saved, asked)
        start = functools.partial(EnvProcess, spec, render=film, check_goes_on=check_goes_on)
        self.env = of_whole_games(start, 1 if film else config.num_episodes)
        self._is_other = self._trained_on not in ("", spec.name)
        try:
            self._agent = restored(saved, spaces_of(self.env), path)
        except BaseException as error:
            self.close()
            misfits = isinstance(error, UsageError) and not isinstance(error, SpecError)
            if not (self._is_other and misfits):
                raise
            raise UsageError(
                f"a model that was trained on {self._trained_on} cannot play {spec.name}, whose "
                "observations or actions differ: remove --env and --preset"
            ) from error

    def load(self, saved: Mapping[str, Any], path: Path) -> None:
        """Loads the weights of another checkpoint; raises UsageError if they do not fit."""
        checkpoints.load_model(self._agent.model, saved, path)

    def play(self, watch: Watcher | None = None) -> Episodes:
        """Plays whole episodes, always from the same starts; watch: receives every observation.

        Converts exceptions of the environment to RunError.
        """
        torch.manual_seed(self._seed)
        config = self._config
        try:
            with one_thread():  # batches are small, so more threads would mostly wait
                return play(
                    self.env,
                    self._agent,
                    config.num_episodes,
                    self._seed,
                    watch,
                    greedy=not config.sampled,
                    random_start=random_start(self.env, config),
                )
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(f"while playing {self.env.env_id}: {what_it_raised(error)}") from error

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    @property
    def where(self) -> str:
        """The name of the environment, and of the training environment if it differs."""
        trained = f" (trained on {self._trained_on})" if self._is_other else ""
        return f"{self.env.env_id}{trained}"

    @property
    def how(self) -> str:
        """How it chooses actions, for messages."""
        actions = "sampled actions" if self._config.sampled else "deterministic"
        most = random_start(self.env, self._config)
        return f"{actions} after 0 to {most} random actions" if most else actions


def random_start(env: VecEnv, config: EvaluationConfig) -> int:
    """Returns the setting, or by default 30 in Atari games, which are deterministic, else 0."""
    if config.random_start is not None:
        return config.random_start
    return _ATARI_RANDOM_START if plays_atari(env.env_id) else 0


def env_of(saved: Mapping[str, Any], asked: EnvSpec) -> EnvSpec:
    """Returns the environment asked for, with the name and options of training as defaults.

    Keyword arguments of the training environment are not used for another one. Raises UsageError
    where nothing names an environment, or as `check_named`.
    """
    check_named(saved["flags"], asked)
    trained_on = checkpoints.env_spec(saved)
    options = asked.options.or_else(trained_on.options)
    spec = dataclasses.replace(asked, options=options)
    if asked.name in ("", trained_on.name):
        kwargs = asked.kwargs or trained_on.kwargs
        spec = dataclasses.replace(trained_on, kwargs=kwargs, options=options)
    if spec.name in ("", UNKNOWN):
        raise UsageError(
            "the checkpoint does not name the environment it was trained on: give --env"
        )
    return spec


def spaces_of(env: VecEnv) -> checkpoints.Spaces:
    """Returns the spaces that the agent for an environment is made of."""
    return env.observation_space, env.action_space, env.frame_stack


def restored(saved: Mapping[str, Any], spaces: checkpoints.Spaces, path: Path) -> Agent:
    """Makes the agent for these spaces with the weights of a checkpoint.

    Raises UsageError if they do not fit, and as `make_agent`.
    """
    agent = make_agent(checkpoints.actor_spec(saved), *spaces)
    checkpoints.load_model(agent.model, saved, path)
    agent.model.eval()
    return agent


def newest_of(run: Path) -> checkpoints.FoundCheckpoint:
    """Reads a checkpoint or, if it is damaged, the one before, with a warning.

    run: a run's folder, or a checkpoint's path. Raises as `checkpoint.load_newest`.
    """
    newest = run / CHECKPOINT if run.is_dir() else run
    found = checkpoints.load_newest(newest, NEEDED)
    if said := checkpoints.sentence(found, newest):
        print(f"Warning: {said}.", file=sys.stderr, flush=True)
    return found


def test(
    folder: Path,
    config: EvaluationConfig,
    asked: EnvSpec = ENV_OF_THE_RUN,
    *,
    seed: int | None = None,
    film: bool = False,
) -> int:
    """Plays whole episodes, prints their returns, and returns the exit code.

    folder: the folder of the run whose checkpoint is evaluated.
    asked: the environment; name and options of the training environment are the defaults.
    film: also write a video into the folder.
    """
    saved, path, _ = newest_of(folder / config.checkpoint)
    show_output()
    step = saved.get("stats", {}).get("step")
    learnt = "" if step is None else f"step {int(step):,}, "
    with closing(EpisodePlayer(saved, path, config, asked, seed=seed, film=film)) as player:
        print(f"{player.where}, {path}, {learnt}{player.how}", flush=True)
        if not film:
            print(report(player.play()))
            return EXIT_DONE
        from torchbeast.evaluation.video import VideoWriter, picture  # OpenCV, for nothing else

        with closing(VideoWriter(folder / "video.mp4")) as video:
            played = player.play(lambda seen: video.write(picture(player.env.render(), seen)))
        print(f"Video: {video.path}\n{report(played)}")
    return EXIT_DONE
