# SPDX-License-Identifier: Apache-2.0
"""A learner that trains, as callbacks see it: counters, metrics, checkpoints and evaluations."""

from __future__ import annotations

import copy
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchbeast.core.actors.contract import Actor
from torchbeast.core.base.checks import at_least
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.errors import expanded
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.training import Training

if TYPE_CHECKING:  # for evaluations
    from torchbeast.run.episodes import Episodes


class RunningLearner:
    """A learner that trains: what callbacks get, a `Learner` or the learner of a program.

    Attributes:
        target_steps: Environment steps at which the run ends.

    Example:
        ```python
        class StopAt(Callback):
            def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
                if learner.get_metrics()["mean_return"] >= 475:
                    learner.stop()
        ```
    """

    target_steps: int
    _training: Training
    _env_options: dict[str, Any]  # {"env_options": the options}, once there are some
    _is_stopped: bool

    @property
    def log_dir(self) -> Path:
        """Folder of the run."""
        return self._training.writer.folder.path

    @property
    def steps(self) -> int:
        """Environment steps that the agent was trained on, including earlier parts of the run."""
        return self._training.progress.step

    @property
    def updates(self) -> int:
        """Number of updates, including earlier parts of the run."""
        return self._training.updates

    @property
    def actor(self) -> Actor:
        """The network that is trained, with its present weights; call `actor.act` to choose
        actions.
        """
        return self._training.made.agent.model

    def done(self) -> bool:
        """Returns whether the agent was trained on target_steps, or `stop` was called."""
        return self._is_stopped or self.steps >= self.target_steps

    def stop(self) -> None:
        """Ends the run after the present step, as if it had reached target_steps.

        For callbacks; elsewhere call the Learner's `close`.
        """
        self._is_stopped = True

    def get_metrics(self) -> dict[str, float]:
        """Returns the metrics of the last update and of the run so far.

        Returns:
            The columns of the last row of logs.csv, including the metrics of callbacks; and step,
            updates, episodes, steps_per_second since the Learner was made, and mean_return and
            mean_length (in steps) of the last 100 episodes, which are NaN before the first episode
            ends.
        """
        progress = self._training.progress
        return {
            **self._training.rows.newest,
            "step": self.steps,
            "updates": self.updates,
            "episodes": progress.episodes,
            "mean_return": progress.mean_return(),
            "mean_length": progress.mean_length(),
            "steps_per_second": self._training.rows.speed(),
        }

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives every training environment options, such as the level of a curriculum.

        An environment gets them when it is reset the next time, `reset(options=...)`, and at every
        reset after it until you give others, also after the run is resumed. The environments of
        `evaluate` do not get them.

        Args:
            options: Names and values, as JSON has them.

        Raises:
            TypeError: If the options are not JSON.
            UsageError: If the environments take no options, or gradient workers have them.
                Environments in other processes may report it later, from `step`.

        Example:
            ```python
            class Curriculum(Callback):
                def on_step(self, learner, metrics):
                    learner.set_env_options({"level": learner.steps // 100_000})
            ```
        """
        json.dumps(dict(options))
        self._training.source.set_env_options(dict(options))
        self._env_options["env_options"] = dict(options)

    def print_info(self) -> None:
        """Prints a line about the run: steps, steps per second, episodes, mean return and loss."""
        print(self._info(), flush=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._info()}>"

    def _info(self) -> str:
        metrics = self.get_metrics()
        share = 100 * self.steps / self.target_steps
        parts = [
            f"step {self.steps:,} of {self.target_steps:,} ({share:.0f} %)",
            f"{metrics['steps_per_second']:,.0f} steps/s",
            f"{self._training.progress.episodes:,} episodes",
        ]
        if not math.isnan(metrics["mean_return"]):
            parts.append(f"mean return {metrics['mean_return']:.2f}")
        if not math.isnan(self._training.progress.loss):
            parts.append(f"loss {self._training.progress.loss:.3g}")
        return ", ".join(parts)

    def save_model(self, path: str | Path | None = None) -> Path:
        """Writes a checkpoint from which a run can continue.

        Args:
            path: Default: model.tar in log_dir, which is also written every ten minutes and at the
                end of the run.

        Returns:
            The path of the file.
        """
        target = self._training.writer.folder.checkpoint if path is None else expanded(path)
        if path is None:
            self._training.save()
        else:
            checkpoints.save(target, self.checkpoint())
        return target

    def checkpoint(self) -> dict[str, Any]:
        """Returns the contents of a checkpoint from which a run can continue, without a file."""
        return self._training.checkpoint()

    def evaluate(
        self, num_episodes: int = 10, *, sampled: bool = False, seed: int | None = None
    ) -> Episodes:
        """Plays whole episodes with the present weights.

        A Learner's environments come from the scheme's test_envs_factory, or else its
        train_envs_factory; a program's are the environment of the run, in a process of their own.

        Args:
            num_episodes: Number of episodes.
            sampled: Whether to sample actions, as in training, instead of taking the most likely
                ones.
            seed: Seed of environments and sampled actions. Default: a random one.

        Returns:
            Returns, lengths in steps and fingerprints of the endings, one per episode; see
            `Episodes`.

        Raises:
            ValueError: If num_episodes is below 1.
            RunError: If an episode takes more than 500,000 steps.

        Example:
            ```python
            learner.evaluate(10, seed=1)  # <10 episodes: mean return 500.00 ± 0.00, ...>
            ```
        """
        from torchbeast.run.episodes import play

        at_least(1, num_episodes=num_episodes)
        seed = secrets.randbits(31) if seed is None else seed
        model = copy.deepcopy(self.actor).to("cpu").eval()
        model.set_precision(self._training.made.compute.precision, torch.device("cpu"))
        with self._training.own, self._test_envs(num_episodes) as env:
            agent = self._training.made.agent._replace(model=model)
            return play(env, agent, num_episodes, seed, greedy=not sampled)

    @contextmanager
    def _test_envs(self, num_episodes: int) -> Iterator[VecEnv]:
        """Makes the environments of an evaluation."""
        raise NotImplementedError
        yield
