# SPDX-License-Identifier: Apache-2.0
"""Plays whole episodes with a checkpoint, and reports their returns or makes a video of them:
`--mode test` and `test_render`.

Checkpoints of TorchBeast 2019 can be evaluated too. A frame of the video is the environment's own
rendering if it has one, as Gymnasium's environments do, otherwise the newest frame of the
observation.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.checks import counted
from torchbeast.core.base.nest import flatten
from torchbeast.core.base.specs import SpecError
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.env_process import EnvProcess, Spaces
from torchbeast.envs.spec import EnvSpec, is_atari
from torchbeast.errors import EXIT_DONE, UsageError, refusing_paths, running_users_code
from torchbeast.fleets.child_process import show_output
from torchbeast.reporting.loggers import upload_video
from torchbeast.reporting.run_folder import CHECKPOINT, run_path
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.config import UNKNOWN, EvaluationConfig, check_named
from torchbeast.run.episodes import Episodes, Watcher, of_whole_games, play, usual_random_start

_FRAMES_PER_SECOND = 15.0  # Atari has 60, divided by the frame skip of 4
_SMALLEST = 240  # pixels a side; smaller frames are enlarged by a whole factor


def report(episodes: Episodes) -> str:
    """Describes returns, lengths and the number of distinct episodes in words."""
    returns, lengths = episodes.returns, episodes.lengths
    each = ", ".join(f"{value:g}" for value in returns)
    if tasks := episodes.task_means():
        means = [f"{task}: mean return {value:.2f}" for task, value in tasks.items()]
        ends = f"Score {episodes.mean:.3f} over {counted(len(returns), 'episode')}."
        return "\n".join([*means, ends])
    return (
        f"Returns: {each}\n"
        f"Mean {statistics.fmean(returns):.2f}, median {statistics.median(returns):.2f}, "
        f"standard deviation {episodes.spread:.2f} over {counted(len(returns), 'episode')}.\n"
        f"Episode length: mean {statistics.fmean(lengths):.0f}, "
        f"min {min(lengths):,}, max {max(lengths):,}.\n"
        f"{episodes.distinct} of {counted(len(returns), 'episode')} unique"
    )


NEEDED = ("model_state_dict", "flags")
"""The keys that a checkpoint needs for an evaluation."""


class EpisodePlayer:
    """Plays with the agent of one run. One thread uses it.

    Attributes:
        env: The environments.
        agent: The agent, which may load the weights of other checkpoints.
    """

    def __init__(
        self,
        saved: Mapping[str, Any],
        path: Path,
        config: EvaluationConfig,
        asked: EnvSpec,
        seed: int | None,
        *,
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
        self._trained_on = checkpoints.recorded_env_spec(saved).name
        spec = env_of(saved, asked)
        spec = spec.with_shares(asked.options.task_shares)  # those of training do not count
        start = functools.partial(EnvProcess, spec, render=film, check_goes_on=check_goes_on)
        self.env = of_whole_games(start, 1 if film else config.num_episodes)
        self._is_other = self._trained_on not in ("", spec.name)
        try:
            self.agent = restored(saved, agent_spaces(self.env), path)
        except BaseException as error:
            self.close()
            misfits = isinstance(error, UsageError) and not isinstance(error, SpecError)
            if not (self._is_other and misfits):
                raise
            raise UsageError(
                f"a model that was trained on {self._trained_on} cannot play {spec.name}, whose "
                "observations or actions differ: remove --env and --preset"
            ) from error

    def play(self, watch: Watcher | None = None) -> Episodes:
        """Plays whole episodes, always from the same starts; watch: receives every observation.

        Converts exceptions of the environment to RunError.
        """
        config = self._config
        with running_users_code(f"while playing {self.env.env_id}"):
            return play(
                self.env,
                self.agent,
                config.num_episodes,
                self._seed,
                watch,
                greedy=not config.sampled,
                random_start=config.random_start,
            )

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
        most = self._config.random_start
        most = usual_random_start(self.env) if most is None else most
        return f"{actions} after 0 to {most} random actions" if most else actions


def env_of(saved: Mapping[str, Any], asked: EnvSpec) -> EnvSpec:
    """Returns the environment asked for, with the name and options of training as defaults.

    Keyword arguments of the training environment are not used for another one. Raises UsageError
    where nothing names an environment, or as `check_named`.
    """
    check_named(saved["flags"], asked)
    trained_on = checkpoints.recorded_env_spec(saved)
    options = asked.options.or_else(trained_on.options)
    if asked.name and not all(map(is_atari, asked.task_names)):  # it would refuse those of Atari
        typed = {name: getattr(asked.options, name) for name in options.of_atari()}
        options = dataclasses.replace(options, **typed)
    if asked.name in ("", trained_on.name):
        kwargs = asked.kwargs or trained_on.kwargs
        spec = dataclasses.replace(trained_on, kwargs=kwargs, options=options)
    else:  # the recorded scale of returns is for other tasks
        spec = dataclasses.replace(asked, options=options)
        spec = spec.with_options(task_returns=asked.options.task_returns)
    if spec.name in ("", UNKNOWN):
        raise UsageError("the checkpoint does not contain the name of its environment: use --env")
    return spec


def agent_spaces(env: VecEnv) -> Spaces:
    """Returns the spaces that the agent for an environment is made of."""
    return env.observation_space, env.action_space, env.frame_stack


def restored(saved: Mapping[str, Any], spaces: Spaces, path: Path) -> Agent:
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
    run = run_path(run)
    newest = run / CHECKPOINT if run.is_dir() else run
    found = checkpoints.load_newest(newest, NEEDED)
    if said := checkpoints.describe_fallback(found, newest):
        print(f"Warning: {said}.", file=sys.stderr, flush=True)
    return found


def test(
    folder: Path, config: EvaluationConfig, asked: EnvSpec, seed: int | None, film: bool = False
) -> int:
    """Plays whole episodes, prints their returns, and returns the exit code.

    folder: the folder of the run whose checkpoint is evaluated; zoo:NAME in any folder for an agent
    of the zoo.
    asked: the environment; name and options of the training environment are the defaults.
    film: also write a video into the folder.
    """
    saved, path, _ = newest_of(folder / config.checkpoint)
    show_output()
    step = saved.get("stats", {}).get("step")
    learnt = "" if step is None else f"step {int(step):,}, "
    with closing(EpisodePlayer(saved, path, config, asked, seed, film=film)) as player:
        print(f"{player.where}, {path}, {learnt}{player.how}", flush=True)
        if not film:
            print(report(player.play()))
            return EXIT_DONE
        with closing(VideoWriter(folder / "video.mp4")) as video:
            with refusing_paths("use another savedir"):
                folder.mkdir(parents=True, exist_ok=True)  # agents of the zoo have none
            played = player.play(lambda seen: video.write(picture(player.env.render(), seen)))
        print(f"Video: {video.path}\n{report(played)}")
        upload_video(folder, int(step or 0), video.path)
    return EXIT_DONE


# --- videos


class VideoWriter:
    """Writes an mp4 file."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError without OpenCV, which is needed for nothing else."""
        try:
            import cv2
        except ImportError:
            needed = "--mode test_render needs OpenCV: pip install 'torchbeast[video]'"
            raise UsageError(needed) from None
        self.path = path
        self._writer, self._code = cv2.VideoWriter(), cv2.VideoWriter.fourcc(*"mp4v")

    def write(self, frame: np.ndarray) -> None:
        """Appends a frame, uint8 [H, W, 3] in RGB order; all frames have the same size."""
        if not self._writer.isOpened():
            size = frame.shape[1], frame.shape[0]
            if not self._writer.open(str(self.path), self._code, _FRAMES_PER_SECOND, size):
                raise UsageError(f"OpenCV cannot write {self.path}: use --mode test")
        self._writer.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV expects BGR

    def close(self) -> None:
        """Completes the file."""
        self._writer.release()


def picture(drawn: np.ndarray | None, observation: Any) -> np.ndarray:
    """Returns a frame of environment 0, uint8 [H, W, 3].

    drawn: the environment's rendering, or None. observation: nest of arrays [1, ...]. Raises
    UsageError if there is neither a rendering nor an image among the observations.
    """
    return to_frame(observation) if drawn is None else _enlarged(drawn)


def to_frame(observation: Any) -> np.ndarray:
    """Returns a frame uint8 [H, W, 3] of the first image [1, C, H, W] or [1, H, W, C].

    If the first dimension is smaller than the last, it holds the channels; otherwise the last one
    does. Three channels are colours; with other numbers, it shows the last channel in gray. An
    image of booleans (MinAtar) shows each channel in a different shade of gray. Raises UsageError
    if no leaf is an image.
    """
    images = [leaf[0] for leaf in flatten(observation) if leaf.ndim == 4]
    if not images:
        raise UsageError(
            "--mode test_render needs a Gymnasium environment that renders itself, or "
            "observations that are images: use --mode test"
        )
    image = images[0] if images[0].shape[0] < images[0].shape[2] else images[0].transpose(2, 0, 1)
    return _enlarged(np.broadcast_to(_visible(image).transpose(1, 2, 0), (*image.shape[1:], 3)))


def _visible(image: np.ndarray) -> np.ndarray:
    """Converts an image [C, H, W] to uint8 [1 or 3, H, W]."""
    if image.dtype == np.bool_:
        grays = np.linspace(255, 80, len(image)).astype(np.uint8)
        return (image * grays[:, None, None]).max(0, keepdims=True)
    newest = image if len(image) == 3 else image[-1:]
    if newest.dtype == np.uint8:
        return newest
    largest = 255 if newest.max(initial=0) > 16 else 1  # gray levels, or small numbers
    return (np.clip(newest, 0, largest) * (255 // largest)).astype(np.uint8)


def _enlarged(frame: np.ndarray) -> np.ndarray:
    factor = max(1, -(-_SMALLEST // min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1)
