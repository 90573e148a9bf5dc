# SPDX-License-Identifier: Apache-2.0
"""Flags of the programs whose environments run in servers; see learner_flags.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.core.base.checks import require
from torchbeast.envs.spec import EnvConfig
from torchbeast.reporting.prometheus import MetricsConfig
from torchbeast.servers import config


@dataclass(frozen=True, kw_only=True)
class ServedLearnerFlags(LearnerFlags):
    """The groups of flags of a learner with environment servers."""

    pipeline: config.PipelineConfig = field(default_factory=config.PipelineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_once = 1 if self.learns_from_transitions else self.rollouts.batch_size
        self.pipeline.queue_size(at_once)


@dataclass(frozen=True, kw_only=True)
class PolyBeastFlags(ServedLearnerFlags):
    """Trains an agent with environment servers on this machine."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    fleet: config.FleetConfig = field(default_factory=config.FleetConfig)


@dataclass(frozen=True, kw_only=True)
class PolyBeastLearnerFlags(ServedLearnerFlags):
    """Trains an agent with environment servers that are already running (polybeast_env)."""

    environment: config.ServedEnvConfig = field(default_factory=config.ServedEnvConfig)
    fleet: config.ServedFleetConfig = field(default_factory=config.ServedFleetConfig)
    security: config.SecurityConfig = field(default_factory=config.SecurityConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.protection  # checked
        plays_here = self.callbacks.eval_every or self.callbacks.callback
        require(
            bool(plays_here or self.transitions.hindsight_share)
            or not (self.command.mode == "train" and self.environment.env_kwargs),
            "--env_kwargs is for --mode test, and for the environments of --eval_every, --callback "
            "and --hindsight_share; in training, add it to polybeast_env",
        )

    @property
    def protection(self) -> config.SecurityConfig | None:
        """Protection of connections to other machines; None: there are no such connections."""
        if self.fleet.listen is not None:
            return self.security.listening()
        if self.fleet.env_servers is not None:
            return self.security.connecting("--env_servers", "the servers'")
        self.security.check_unused("--env_servers or --listen")
        return None


@dataclass(frozen=True, kw_only=True)
class PolyBeastEnvFlags:
    """Serves environments to a learner (polybeast_learner) until Ctrl-C."""

    environment: EnvConfig = field(default_factory=EnvConfig)
    servers: config.ServersConfig = field(default_factory=config.ServersConfig)
    security: config.SecurityConfig = field(default_factory=config.SecurityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        _ = self.protection  # checked
        require(
            not self.environment.task_returns,
            "--task_returns scales what the learner logs: give it to polybeast_learner instead",
        )

    @property
    def protection(self) -> config.SecurityConfig | None:
        """Protection of connections to other machines; None: there are no such connections."""
        if self.servers.listen is not None:
            return self.security.listening()
        if self.servers.learner is not None:
            return self.security.connecting("--learner", "the learner's")
        self.security.check_unused("--listen HOST:PORT or --learner HOST:PORT")
        return None
