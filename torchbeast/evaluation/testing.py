# SPDX-License-Identifier: Apache-2.0
"""`--mode test` and `test_render` of every program: evaluates the checkpoint of a run.

Checkpoints of the original TorchBeast can be evaluated too.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from torchbeast.core.actors.agent import Agent, make_agent
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.core.specs import SpecError
from torchbeast.core.threads import one_thread
from torchbeast.envs.atari import is_atari
from torchbeast.envs.opening import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE, RunError, UsageError, as_usage_error, what_it_raised
from torchbeast.evaluation.config import EvaluationConfig
from torchbeast.evaluation.play import MAX_PARALLEL, Episodes, play, report
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.learning import kept_checkpoints
from torchbeast.learning.recorded import check_named
from torchbeast.learning.reward_clipping import UNKNOWN

_ATARI_RANDOM_START = 30  # the usual number of no-ops in the literature
_ENV_OF_THE_RUN = EnvSpec("")
NEEDED = ("model_state_dict", "flags")
"""The keys that a checkpoint must have to be evaluated."""


def test(
    folder: Path,
    config: EvaluationConfig,
    asked: EnvSpec = _ENV_OF_THE_RUN,
    *,
    seed: int | None = None,
    film: bool = False,
) -> int:
    """Plays whole episodes, prints their returns, and returns the exit code.

    folder: the folder of the run whose checkpoint is evaluated.
    asked: the environment; its name and options default to those of training.
    film: also write a video into the folder.
    """
    newest = folder / "model.tar"
    found = kept_checkpoints.load_newest(newest, NEEDED)
    saved, path = found.checkpoint, found.path
    if said := kept_checkpoints.sentence(found, newest):
        print(f"Warning: {said}.", file=sys.stderr, flush=True)
    trained_on = checkpoints.env_spec(saved)
    check_named(saved["flags"], asked)
    spec = _played(asked, trained_on)
    num_envs = 1 if film else min(config.num_episodes, MAX_PARALLEL)
    with closing(_environment(spec, num_envs, film)) as env:
        with _fitting(trained_on.name, spec.name):
            agent = _agent(saved, env, path)
        seed = secrets.randbits(31) if seed is None else seed
        torch.manual_seed(seed)
        try:
            with one_thread():  # batches are small: more of them would mostly wait
                episodes = _play(env, agent, config, seed, folder / "video.mp4" if film else None)
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(f"while playing {env.env_id}: {what_it_raised(error)}") from error
    is_other = trained_on.name not in ("", spec.name)
    where = env.env_id + (f" (trained on {trained_on.name})" if is_other else "")
    print(f"{where}, {path}, {_how(saved, config, env)}\n{report(episodes)}")
    return EXIT_DONE


def _random_start(env: VecEnv, config: EvaluationConfig) -> int:
    """Returns the number asked for; by default 30 in Atari games, which are deterministic."""
    if config.random_start is not None:
        return config.random_start
    return _ATARI_RANDOM_START if is_atari(env.env_id) else 0


def _how(saved: dict[str, Any], config: EvaluationConfig, env: VecEnv) -> str:
    step = saved.get("stats", {}).get("step")
    actions = "sampled actions" if config.sampled else "the most likely actions"
    if most := _random_start(env, config):
        actions += f" after 0 to {most} random ones"
    return actions if step is None else f"step {int(step):,}, {actions}"


def _play(
    env: VecEnv, agent: Agent, config: EvaluationConfig, seed: int, video: Path | None
) -> Episodes:
    play_it = functools.partial(
        play,
        env,
        agent,
        config.num_episodes,
        seed,
        greedy=not config.sampled,
        random_start=_random_start(env, config),
    )
    if video is None:
        return play_it()
    from torchbeast.evaluation.video import VideoWriter, picture  # OpenCV, which nothing else needs

    with VideoWriter(video) as writer:

        def film(observation: Any) -> None:
            writer.write(picture(env, observation))

        episodes = play_it(watch=film)
    print(f"The video is {writer.path}")
    return episodes


def _played(asked: EnvSpec, trained_on: EnvSpec) -> EnvSpec:
    """Returns the environment asked for, with the name and options of training as defaults.

    Keyword arguments of the training environment are not used for another one.
    """
    options = asked.options.or_else(trained_on.options)
    if asked.name not in ("", trained_on.name):
        return dataclasses.replace(asked, options=options)
    kwargs = asked.kwargs or trained_on.kwargs
    return dataclasses.replace(trained_on, kwargs=kwargs, options=options)


def _environment(spec: EnvSpec, num_envs: int, film: bool) -> VecEnv:
    if spec.name in ("", UNKNOWN):
        raise UsageError(
            "the checkpoint does not name the environment it was trained on: give --env"
        )
    return make_environment(spec, num_envs, film)


@contextmanager
def _fitting(trained_on: str, played: str) -> Iterator[None]:
    """Explains a mismatch between a model and another environment than that of training."""
    try:
        yield
    except UsageError as error:
        if trained_on in ("", played) or isinstance(error.__cause__, SpecError):
            raise
        raise UsageError(
            f"a model that was trained on {trained_on} cannot play {played}, whose observations or "
            "actions differ: leave out --env, and --preset"
        ) from error


def _agent(saved: dict[str, Any], env: VecEnv, path: Path) -> Agent:
    spaces = env.observation_space, env.action_space, env.frame_stack
    with as_usage_error():
        agent = make_agent(checkpoints.actor_spec(saved), *spaces)
    checkpoints.load_model(agent.model, saved, path)
    agent.model.eval()
    return agent
