# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: everything about it before it begins.

    flags of a program --> LearnerFlags.plan --+
                                               +--> Plan --> LearnerRun(plan, session)
    Scheme --> learner/plan.py: plan_of -------+

Its `collection` makes the run's source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from torchbeast.collect.collection_plan import CollectionPlan
from torchbeast.collect.config import ReplayConfig, RolloutConfig, TransitionsConfig
from torchbeast.collect.contract import Publisher
from torchbeast.core.actors.contract import Agent
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import IMPALAConfig, StepConfig, recorded
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.selection import leaf_keys
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.reporting.log_files import FILES, Logger
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.reporting.prometheus import MetricsConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import (
    CheckpointConfig,
    HardwareConfig,
    check_named,
    recorded_env,
    resolved,
)

if TYPE_CHECKING:
    from torchbeast.collect.replay import Join

MakeAgent = Callable[[ActorSpec], Agent]
"""Makes an agent whose network has this spec, for the run's environment; may raise UsageError."""

MakeWeights = Callable[[nn.Module, int], Publisher]
"""Makes the Publisher, which publishes the model's weights as this version."""

MakeGradientWorkers = Callable[["Plan", Any, int, ExitStack], Any]
"""Makes the JointLearner of the run's gradient workers, for the Assembled learner of this process.
The seed is of all their environments; the ExitStack ends them."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The settings of a learner."""

    actor: ActorSpec  # its name may be "auto": the observation space decides
    algo: type[Algorithm[Any]]
    algorithm: Any  # settings of the algorithm, of type algo.Config
    step: StepConfig
    total_steps: int
    rollouts: RolloutConfig
    hardware: HardwareConfig
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    transitions: TransitionsConfig = field(default_factory=TransitionsConfig)
    synchronous_rollouts: int = 0  # for algorithms on single steps, see online_rollouts
    reproducible: bool = False  # same results on all machines of one kind, see choose

    @property
    def spare_columns(self) -> int:
        """Number of replayed rollouts in a batch, in addition to the new ones."""
        return 0 if self.learns_from_transitions else self.replay.spare_columns(self.rollouts)

    @property
    def learns_from_transitions(self) -> bool:
        """Whether batches are single steps of a replay."""
        from torchbeast.core.storages.transition import Transitions

        return issubclass(self.algo.takes, Transitions)

    @property
    def online_rollouts(self) -> RolloutConfig:
        """The batches of the online source. For a replay of single steps a batch is one rollout,
        collected during updates, or synchronous_rollouts of them, collected between updates.
        """
        if self.learns_from_transitions:
            return dataclasses.replace(self.rollouts, batch_size=self.synchronous_rollouts or 1)
        return self.rollouts

    def in_environment(self, name: str) -> LearnerConfig:
        """Returns the settings with the environment's reward clipping in place of "auto"."""
        algorithm = self.algorithm
        clipping = resolved(getattr(algorithm, "reward_clipping", "auto"), name)
        if hasattr(algorithm, "reward_clipping"):
            algorithm = dataclasses.replace(algorithm, reward_clipping=clipping)
        actor = dataclasses.replace(self.actor, reward_input=clipping)
        return dataclasses.replace(self, actor=actor, algorithm=algorithm)

    def after(self, recorded: Mapping[str, Any]) -> LearnerConfig:
        """Returns the settings with a decision where normalise_returns has none: that of the
        earlier run, because its checkpoint has the statistics of returns or lacks them.

        recorded: the earlier run's settings, by the names of flags; {} without one.
        """
        algorithm = self.algorithm
        if not isinstance(algorithm, IMPALAConfig) or algorithm.normalise_returns is not None:
            return self
        found = recorded.get("normalise_returns")
        if found is None:
            found = algorithm.reward_clipping == "none" and algorithm.reward_scale == 1.0
        algorithm = dataclasses.replace(algorithm, normalise_returns=found)
        return dataclasses.replace(self, algorithm=algorithm)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a run before it begins: learner, environment, collection, and outputs.

    Attributes:
        program: The program whose command resumes the run.
        recorded: Every setting by the name of its flag, as the user gave it.
        observation_space: Of one environment, before frames are stacked.
        others_serve: Whether servers that the program did not start serve the environment.
        asked: The environment that the command line names.
        make_envs: Makes that many environments in this process; None: `env` says how.
        gradients: Makes the gradient workers; None: this process computes the gradients.
        join_replay: Joins the replay that agents share, if there is one.
        callbacks: Objects of class Callback, which a program calls.
        of_command: Names of settings of the command, not of the run.
        repeated: Words to repeat in the command that resumes the run.
        becomes_latest: Whether the link `latest` will point to the run's folder.
    """

    program: str
    run: RunConfig
    recorded: Mapping[str, Any]

    learner: LearnerConfig
    make_agent: MakeAgent
    gradients: MakeGradientWorkers | None = None

    env: EnvSpec
    observation_space: Any = ()
    others_serve: bool = False
    asked: EnvSpec = EnvSpec("")  # noqa: RUF009 - frozen
    make_envs: Callable[[int], VecEnv] | None = None

    collection: CollectionPlan
    join_replay: Join | None = None

    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    display: DisplayConfig = field(default_factory=DisplayConfig)
    loggers: Sequence[Logger] = FILES
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    callbacks: Sequence[Any] = ()
    of_command: Collection[str] = ()
    repeated: Sequence[str] = ()
    becomes_latest: bool = True

    def local_env(self) -> EnvSpec:
        """Returns the environment for a process on this machine.

        Raises UsageError, as `check_named`, if a server that can be anyone's describes it.
        """
        if self.others_serve:
            check_named(self.recorded_env(), self.asked)
        return self.env

    def recorded_env(self) -> dict[str, Any]:
        """Returns the settings of the environment, by the names of flags."""
        keys = leaf_keys(self.observation_space)
        options = {**self.env.options.as_json(), "observation_keys": keys}
        return {**recorded_env(self.env, self.others_serve), **options}

    def record(self) -> dict[str, Any]:
        """Returns what the run records: every setting by the name of its flag, as it is used."""
        return {**self.recorded, **recorded(self.learner.algorithm), **self.recorded_env()}
