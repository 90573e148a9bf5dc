# SPDX-License-Identifier: Apache-2.0
"""The flags that every learner program has, and MonoBeast's own: groups of components' Configs.

The default, check and help text of a flag are in the Config of the component that it configures.
This module adds the flags that select what to run, checks that involve several groups, and what a
run is made of. The messages of these checks name flags as you type them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchbeast.collect.config import (
    ProcessesConfig,
    ReplayConfig,
    RolloutConfig,
    TransitionsConfig,
)
from torchbeast.core.algos import registry
from torchbeast.core.algos.config import IMPALAConfig, StepConfig, recorded, usual_of
from torchbeast.core.base.checks import names_with, require, setting, typed
from torchbeast.core.base.specs import ModelConfig, kwargs_of
from torchbeast.envs.spec import EnvConfig, EnvSpec
from torchbeast.reporting.loggers import DisplayConfig, LogConfig
from torchbeast.reporting.prometheus import MetricsConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import (
    CallbacksConfig,
    CheckpointConfig,
    EvaluationConfig,
    HardwareConfig,
    TrainingConfig,
)

if TYPE_CHECKING:  # they import torch, as the methods do that use them
    from torchbeast.collect.contract import CollectionPlan
    from torchbeast.collect.replay import Join
    from torchbeast.envs.env_process import Spaces
    from torchbeast.run.assemble import LearnerConfig
    from torchbeast.run.plan import Plan


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """Training or evaluation."""

    mode: Literal["train", "test", "test_render"] = setting("train", "command")
    """train: train an agent. test: evaluate the checkpoint of --xpid, or of the latest run in
    --savedir, once or, with --follow, repeatedly while the run trains. test_render: record a
    video."""


@dataclass(frozen=True, kw_only=True)
class DefaultsFlags:
    """Flags that change the defaults of other flags."""

    algo: str = setting(registry.DEFAULT, "agent")
    """Algorithm. On-policy: impala (V-trace), ppo, pqn (Q-learning). With a replay buffer
    (--replay_size): laser (IMPALA), dqn (discrete actions), r2d2 (dqn with an LSTM), sac, td3
    (continuous actions). Your own: package.module:MyAlgo. Its hyperparameters become flags: add
    --help to list them. A resumed run keeps its algorithm."""
    preset: str | None = setting(None, "command")
    """Tuned settings for a task, used as defaults of the other flags; --preset help lists them, and
    --preset help:PART prints those with PART in their name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "algo", registry.spelt(self.algo))
        object.__setattr__(self, "preset", self.preset and self.preset.lower())


@dataclass(frozen=True, kw_only=True)
class LearnerFlags:
    """The groups of flags that every learner has.

    `algorithm` is replaced by the Config of the algorithm that --algo names, see `with_algorithm`.
    """

    model_for_images: ClassVar[str] = "deep"
    """The network that --model auto selects for images."""

    command: CommandFlags = field(default_factory=CommandFlags)
    defaults: DefaultsFlags = field(default_factory=DefaultsFlags)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    display: DisplayConfig = field(default_factory=DisplayConfig)
    logs: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    transitions: TransitionsConfig = field(default_factory=TransitionsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: IMPALAConfig = field(default_factory=IMPALAConfig)
    step: StepConfig = field(default_factory=StepConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        self._check_replay()
        mode, played = self.command.mode, self.evaluation
        require(
            not self.replay.checkpoint_replay or not self.checkpoints.disable_checkpoint,
            "--checkpoint_replay saves the replay with every checkpoint; remove "
            "--disable_checkpoint",
        )
        require(
            mode == "test" or not played.follow,
            f"--follow evaluates a run while it trains: use --mode test, not {mode}",
        )
        for name in ("checkpoint", "num_episodes", "sampled", "random_start"):
            is_usual = getattr(played, name) == getattr(EvaluationConfig, name)
            require(mode != "train" or is_usual, f"--{name} is for --mode test")

    def _check_replay(self) -> None:
        if not self.learns_from_transitions:
            self.replay.spare_columns(self.rollouts)
            if self.command.mode == "train":
                self.transitions.check_unused(usual_of(type(self.algorithm)))
            return
        require(
            self.step.max_lag is None,
            f"--max_lag limits the age of rollouts, but --algo {self.defaults.algo} trains on "
            "replayed steps of any age: remove it",
        )
        rollouts, total_steps = self.rollouts, self.training.total_steps
        self.replay.updates_per_step(rollouts.batch_size, rollouts.unroll_length, total_steps)

    @property
    def learns_from_transitions(self) -> bool:
        """Whether the run trains on single steps of a replay."""
        trains = self.command.mode == "train"
        return trains and registry.learns_from_transitions(self.defaults.algo)

    @property
    def synchronous_rollouts(self) -> int:
        """Rollouts to collect between updates on single steps; 0: collect during updates."""
        return 0

    @property
    def is_reproducible(self) -> bool:
        """Whether the run gives the same results on all machines of one kind."""
        return False

    # --- what programs do with their flags

    def plan(self, program: str, env: EnvSpec, spaces: Spaces, collection: CollectionPlan) -> Plan:
        """Returns the plan of a run.

        Args:
            program: Name of the program.
            env: The environment.
            spaces: Its spaces.
            collection: How the run collects.
        """
        from torchbeast.core.actors.registry import make_agent
        from torchbeast.run.periodic import of_config
        from torchbeast.run.plan import Plan

        settings = recorded(self)
        # Returns in self-play are against opponents that improve, so the highest is not the best.
        keep_best = not (self.checkpoints.disable_checkpoint or env.options.selfplay)
        return Plan(
            program=program,
            run=self.run,
            recorded=settings,
            learner=self.learner_config(env.name),
            make_agent=lambda spec: make_agent(spec, *spaces, self.model_for_images),
            env=env,
            observation_space=spaces[0],
            collection=collection,
            join_replay=self._join_replay(),
            checkpoints=self.checkpoints,
            display=self.display,
            loggers=self.logs.loggers(),
            metrics=self.metrics,
            of_command=names_with("command", self),
            repeated=words_of(settings, names_with("connection", self)),
            callbacks=of_config(self.callbacks, keep_best),
        )

    def _join_replay(self) -> Join | None:
        """Returns the function that joins the replay that agents share, if there is one."""
        if (address := self.replay.replay_service) is None:
            return None
        from torchbeast.on_ray.replay import joined

        return functools.partial(joined, address)

    def learner_config(self, env_id: str) -> LearnerConfig:
        """Returns the settings of a learner for this environment."""
        from torchbeast.run.assemble import LearnerConfig

        return LearnerConfig(
            actor=self.model.spec,
            algo=registry.find_algorithm(self.defaults.algo),
            algorithm=self.algorithm,
            step=self.step,
            total_steps=self.training.total_steps,
            rollouts=self.rollouts,
            replay=self.replay,
            transitions=self.transitions,
            hardware=self.hardware,
            synchronous_rollouts=self.synchronous_rollouts,
            reproducible=self.is_reproducible,
        ).in_environment(env_id)

    def test_run(self, asked: EnvSpec) -> int:
        """Evaluates the checkpoints of the run that the flags name; returns the exit code.

        Raises UsageError if they name another network or algorithm than the run has.
        """
        from torchbeast.evaluation.following import follow
        from torchbeast.evaluation.play import NEEDED, test
        from torchbeast.run.earlier_run import EarlierRun

        folder, config, seed = self.run.folder, self.evaluation, self.run.seed
        if config.follow:
            return follow(folder, config, asked, seed or 0, self._check_typed)
        earlier = EarlierRun.newest(folder / config.checkpoint, NEEDED)
        earlier.check_same_algorithm(self.defaults.algo)
        earlier.check_same_model(earlier.actor(self.model.spec))
        film = self.command.mode == "test_render"
        return test(folder, config, asked, seed, film)

    def _check_typed(self, saved: dict[str, Any], path: Path) -> None:
        """Raises UsageError like `test_run`; default values stand for the run's own values."""
        from torchbeast.run.checkpoint import FoundCheckpoint, actor_spec
        from torchbeast.run.earlier_run import EarlierRun

        earlier, asked = EarlierRun(FoundCheckpoint(saved, path)), self.model.spec
        if self.defaults.algo != registry.DEFAULT:
            earlier.check_same_algorithm(self.defaults.algo)
        kwargs = asked.kwargs or kwargs_of(earlier.recorded)
        use_lstm = asked.use_lstm or actor_spec(saved).use_lstm
        earlier.check_same_model(earlier.actor(replace(asked, kwargs=kwargs, use_lstm=use_lstm)))


def words_of(settings: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Returns the settings of these names that have a value, as words of a command line."""
    given = {name: value for name, value in settings.items() if name in names and value}
    words = ([f"--{k}"] if v is True else typed(f"--{k}", v) for k, v in given.items())
    return [word for flag in words for word in flag]


@dataclass(frozen=True, kw_only=True)
class MonoBeastFlags(LearnerFlags):
    """Trains an agent on this machine. Needs no compiler."""

    model_for_images = "shallow"  # as in MonoBeast 2019; PolyBeast has the deep network, as in 2019

    environment: EnvConfig = field(default_factory=EnvConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_fixed_lag()
        threads = self.hardware.num_learner_threads
        require(
            not self.is_reproducible or threads in (None, 1),
            f"--fixed_lag needs a single learner thread: remove --num_learner_threads {threads}, "
            "or give --fixed_lag None",
        )

    def _check_fixed_lag(self) -> None:
        lag, limit = self.processes.fixed_lag, self.step.max_lag
        require(
            lag is None or limit is None or lag <= limit,
            f"--fixed_lag {lag} is above --max_lag {limit}, so almost no data would be trained on: "
            f"use --max_lag {lag} or more",
        )
        if self.synchronous_rollouts:
            require(
                lag == 0,
                f"--fixed_lag {lag} counts updates, but with --algo {self.defaults.algo} their "
                "number per rollout varies: use --fixed_lag 0, which collects only between updates",
            )
            self.replay.check_waits("--fixed_lag 0")
        is_usual = lag == usual_of(type(self.algorithm)).get("fixed_lag")
        whose = f", the default of {self.defaults.algo}" if is_usual else ""
        self.processes.check_fixed_lag(self.synchronous_rollouts or self.rollouts.batch_size, whose)

    @property
    def synchronous_rollouts(self) -> int:
        is_used = self.learns_from_transitions and self.is_reproducible
        return self.processes.environments() if is_used else 0

    @property
    def is_reproducible(self) -> bool:
        return self.processes.fixed_lag is not None
