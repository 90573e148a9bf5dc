# SPDX-License-Identifier: Apache-2.0
"""The flags of the programs: the Configs of their parts, in groups.

A flag's default, check and help text stand in the Config of the part that obeys it. Here are the
flags that decide which part runs, and what only the whole can check: those sentences name flags as
they are typed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchbeast.core.actors.config import ModelConfig
from torchbeast.core.checks import above, at_least, between, require
from torchbeast.envs.config import EnvConfig
from torchbeast.evaluation.config import EvaluationConfig
from torchbeast.learning.config import CheckpointConfig, HardwareConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.sources.config import RolloutConfig
from torchbeast.sources.processes.config import ProcessesConfig
from torchbeast.sources.servers.config import (
    FleetConfig,
    PipelineConfig,
    ServedEnvConfig,
    ServedFleetConfig,
    ServersConfig,
)


@dataclass(frozen=True, kw_only=True)
class CommandFlags:
    """What is done."""

    mode: Literal["train", "test", "test_render"] = "train"
    """train; test: play whole episodes with the checkpoint of --xpid, or else of the latest run in
    --savedir; test_render: the same, and write a video."""


@dataclass(frozen=True, kw_only=True)
class DefaultsFlags:
    """Read first: what the defaults of the other flags are."""

    preset: str | None = None
    """Settings that belong together take the place of the defaults below and above;
    help lists them."""


@dataclass(frozen=True, kw_only=True)
class LearningFlags:
    """What is learnt from how much. A step is one agent step of one environment (four Atari
    frames)."""

    total_steps: int = 100_000
    """Environment steps to learn from; the learning rate reaches 0 there."""
    discounting: float = 0.99
    """Discount of a reward one step later."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this in the loss (never in the logs), before they are clipped.
    Returns of about one are learnt best."""
    reward_clipping: Literal["auto", "abs_one", "none"] = "auto"
    """abs_one: rewards are clamped to [-1, 1] in the loss (never in the logs). none: they are
    learnt from as they are. The network sees them clamped too, or else as sign(r) log(1 + |r|).
    auto: abs_one for Atari games, none elsewhere; abs_one also with servers of the original
    TorchBeast, which do not say what they serve."""
    entropy_cost: float = 0.0006
    """Weight of the entropy bonus: more keeps exploring longer."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""

    def __post_init__(self) -> None:
        at_least(1, total_steps=self.total_steps)
        at_least(0, entropy_cost=self.entropy_cost, baseline_cost=self.baseline_cost)
        above(0, reward_scale=self.reward_scale)
        between(0, 1, discounting=self.discounting)


@dataclass(frozen=True, kw_only=True)
class OptimiserFlags:
    """RMSprop, PyTorch's (epsilon is added outside the root)."""

    learning_rate: float = 0.00048
    """It falls linearly from this to 0 at --total_steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows from 0 at first. RMSprop's average starts at 0: with
    a small --epsilon the first updates are up to ten times as large as later ones, and can
    silence a network for good."""
    alpha: float = 0.99
    """Smoothing of the squared gradient."""
    momentum: float = 0.0
    """Momentum."""
    epsilon: float = 0.01
    """Added to the root of the squared gradient."""
    grad_norm_clipping: float = 40.0
    """Largest norm of a gradient."""

    def __post_init__(self) -> None:
        above(0, learning_rate=self.learning_rate, epsilon=self.epsilon)
        above(0, grad_norm_clipping=self.grad_norm_clipping)
        at_least(0, alpha=self.alpha, momentum=self.momentum, warmup_steps=self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class LearnerFlags:
    """The groups that every learner has."""

    command: CommandFlags = field(default_factory=CommandFlags)
    defaults: DefaultsFlags = field(default_factory=DefaultsFlags)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    learning: LearningFlags = field(default_factory=LearningFlags)
    optimiser: OptimiserFlags = field(default_factory=OptimiserFlags)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        mode, played = self.command.mode, self.evaluation
        require(
            mode == "train" or not self.checkpoints.disable_checkpoint,
            f"--mode {mode} reads a checkpoint; leave out --disable_checkpoint",
        )
        require(
            mode != "train" or not played.sampled,
            "--sampled is for --mode test; training always samples",
        )
        require(
            mode != "train" or played.random_start is None,
            "--random_start is for --mode test; episodes of training differ by themselves",
        )


@dataclass(frozen=True, kw_only=True)
class MonoBeastFlags(LearnerFlags):
    """Trains an IMPALA agent on this machine; needs nothing that is compiled."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.processes.check_fixed_lag(self.rollouts.batch_size)
        threads = self.hardware.num_learner_threads
        require(
            not self.is_reproducible or threads in (None, 1),
            f"with --fixed_lag one thread learns: leave out --num_learner_threads {threads}",
        )

    @property
    def is_reproducible(self) -> bool:
        """Whether the run is the same on every machine."""
        return self.processes.fixed_lag is not None


@dataclass(frozen=True, kw_only=True)
class ServedLearnerFlags(LearnerFlags):
    """The groups of a learner that has environment servers."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pipeline.queue_size(self.rollouts.batch_size)


@dataclass(frozen=True, kw_only=True)
class PolyBeastFlags(ServedLearnerFlags):
    """Trains an IMPALA agent: starts the environment servers and learns from them."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)


@dataclass(frozen=True, kw_only=True)
class PolyBeastLearnerFlags(ServedLearnerFlags):
    """Trains an IMPALA agent from environment servers that run already (polybeast_env)."""

    environment: ServedEnvConfig = field(default_factory=ServedEnvConfig)
    fleet: ServedFleetConfig = field(default_factory=ServedFleetConfig)


@dataclass(frozen=True, kw_only=True)
class PolyBeastEnvFlags:
    """Serves environments to a learner (polybeast_learner) until Ctrl-C."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
