# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: everything about it before it begins.

    flags of a program --> LearnerFlags.plan --+
                                               +--> Plan --> LearnerRun(plan, session)
    Scheme --> learner/plan.py: plan_of -------+

Its `collection` makes the run's source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchbeast.collect.contract import CollectionPlan
from torchbeast.core.algos.config import recorded
from torchbeast.core.envs.selection import leaf_keys
from torchbeast.core.envs.tasks import has_tasks
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.reporting.loggers import DisplayConfig, LogConfig, Logger
from torchbeast.reporting.prometheus import MetricsConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.assemble import Assembled, LearnerConfig, MakeAgent
from torchbeast.run.config import CheckpointConfig, check_named, recorded_env

if TYPE_CHECKING:
    from torchbeast.collect.replay import Join

MakeGradientWorkers = Callable[["Plan", Assembled, int, ExitStack], Any]
"""Makes the JointLearner of the run's gradient workers, for the learner of this process. The seed
is of all their environments; the ExitStack ends them."""


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
    loggers: Sequence[Logger] = field(default_factory=LogConfig().loggers)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    callbacks: Sequence[Any] = ()
    of_command: Collection[str] = ()
    repeated: Sequence[str] = ()
    becomes_latest: bool = True

    def local_env(self) -> EnvSpec:
        """Returns the environment for a process on this machine, with all tasks in equal shares.

        Keyword arguments of the command line replace the servers' own. Raises UsageError, as
        `check_named`, if a server that can be anyone's describes it.
        """
        if not self.others_serve:
            return self.env.with_shares()
        check_named(self.recorded_env(), self.asked)
        return replace(self.env, kwargs=self.asked.kwargs or self.env.kwargs).with_shares()

    def recorded_env(self) -> dict[str, Any]:
        """Returns the settings of the environment, by the names of flags."""
        keys = self.env.options.observation_keys
        if not has_tasks(self.observation_space):  # each task has its own
            keys = tuple(leaf_keys(self.observation_space))
        options = {**vars(self.env.options), "observation_keys": list(keys)}
        return {**recorded_env(self.env, self.others_serve), **options}

    def record(self) -> dict[str, Any]:
        """Returns what the run records: every setting by the name of its flag, as it is used."""
        return {**self.recorded, **recorded(self.learner.algorithm), **self.recorded_env()}
