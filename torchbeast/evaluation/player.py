# SPDX-License-Identifier: Apache-2.0
"""The agent of a run in environments that stay open, for one checkpoint or many."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.ambient import one_thread
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.specs import SpecError
from torchbeast.envs.atari import is_atari
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError, what_it_raised
from torchbeast.evaluation.config import EvaluationConfig
from torchbeast.evaluation.play import MAX_PARALLEL, Episodes, Watcher, play
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning.recorded import check_named
from torchbeast.learning.reward_clipping import UNKNOWN

_ATARI_RANDOM_START = 30  # the usual number of no-ops in the literature
ENV_OF_THE_RUN = EnvSpec("")
NEEDED = ("model_state_dict", "flags")
"""The keys that a checkpoint must have to be evaluated."""


class Player:
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
        asked: the environment; its name and options default to those of training.
        seed: of every evaluation; None: a random one.
        film: the environment, which is a single one then, renders itself if it can.
        check_goes_on: raises an exception to give up a wait for the environments.
        """
        self._config = config
        self._seed = secrets.randbits(31) if seed is None else seed
        self._trained_on = checkpoints.env_spec(saved).name
        check_named(saved["flags"], asked)
        spec = _played(asked, checkpoints.env_spec(saved))
        num_envs = 1 if film else min(config.num_episodes, MAX_PARALLEL)
        if spec.name in ("", UNKNOWN):
            raise UsageError(
                "the checkpoint does not name the environment it was trained on: give --env"
            )
        self.env = EnvProcess(spec, num_envs, render=film, check_goes_on=check_goes_on)
        try:
            with _fitting(self._trained_on, spec.name):
                self._agent = _agent(saved, self.env, path)
        except BaseException:
            self.close()
            raise
        self._is_other = self._trained_on not in ("", spec.name)

    def load(self, saved: Mapping[str, Any], path: Path) -> None:
        """Takes the weights of another checkpoint; raises UsageError if they do not fit."""
        checkpoints.load_model(self._agent.model, saved, path)

    def play(self, watch: Watcher | None = None) -> Episodes:
        """Plays whole episodes, from the same starts every time; watch: gets every observation.

        Raises RunError in place of an exception of the environment.
        """
        torch.manual_seed(self._seed)
        config, most = self._config, self._random_start
        try:
            with one_thread():  # batches are small: more of them would mostly wait
                return play(
                    self.env,
                    self._agent,
                    config.num_episodes,
                    self._seed,
                    watch,
                    greedy=not config.sampled,
                    random_start=most,
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
        """The environment, and that of training where it is another."""
        trained = f" (trained on {self._trained_on})" if self._is_other else ""
        return f"{self.env.env_id}{trained}"

    @property
    def how(self) -> str:
        """How actions are chosen."""
        actions = "sampled actions" if self._config.sampled else "the most likely actions"
        most = self._random_start
        return f"{actions} after 0 to {most} random ones" if most else actions

    @property
    def _random_start(self) -> int:
        return random_start(self.env, self._config)


def random_start(env: VecEnv, config: EvaluationConfig) -> int:
    """Returns the number asked for; by default 30 in Atari games, which are deterministic."""
    if config.random_start is not None:
        return config.random_start
    return _ATARI_RANDOM_START if is_atari(env.env_id) else 0


def _played(asked: EnvSpec, trained_on: EnvSpec) -> EnvSpec:
    """Returns the environment asked for, with the name and options of training as defaults.

    Keyword arguments of the training environment are not used for another one.
    """
    options = asked.options.or_else(trained_on.options)
    if asked.name not in ("", trained_on.name):
        return dataclasses.replace(asked, options=options)
    kwargs = asked.kwargs or trained_on.kwargs
    return dataclasses.replace(trained_on, kwargs=kwargs, options=options)


@contextmanager
def _fitting(trained_on: str, played: str) -> Iterator[None]:
    """Explains a mismatch between a model and another environment than that of training."""
    try:
        yield
    except UsageError as error:
        if trained_on in ("", played) or isinstance(error, SpecError):
            raise
        raise UsageError(
            f"a model that was trained on {trained_on} cannot play {played}, whose observations or "
            "actions differ: leave out --env, and --preset"
        ) from error


def _agent(saved: Mapping[str, Any], env: VecEnv, path: Path) -> Agent:
    spaces = env.observation_space, env.action_space, env.frame_stack
    agent = make_agent(checkpoints.actor_spec(saved), *spaces)
    checkpoints.load_model(agent.model, saved, path)
    agent.model.eval()
    return agent
