# SPDX-License-Identifier: Apache-2.0
"""Settings of PolyBeast's source: environment servers, inference and the learner's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchbeast.core.checks import above, at_least, require
from torchbeast.envs.spec import EnvSpec
from torchbeast.processes.cores import available_cores
from torchbeast.sources.config import ActorsConfig


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Inference, and the queue between the environment servers and the learner."""

    num_inference_threads: int | None = None
    """Number of threads that choose actions, each with its own copy of the network.
    Default: 2 with a GPU, else one for every four cores, at least one; one if its operations use
    all cores (see --torch_threads)."""
    max_learner_queue_size: int | None = None
    """Rollouts that may wait for the learner; more mean older data. Default: two batches.
    """

    def __post_init__(self) -> None:
        at_least(1, num_inference_threads=self.num_inference_threads)
        at_least(1, max_learner_queue_size=self.max_learner_queue_size)

    def queue_size(self, batch_size: int) -> int:
        """Returns how many rollouts may wait; raises ValueError for fewer than a batch."""
        size = self.max_learner_queue_size
        require(
            size is None or size >= batch_size,
            f"max_learner_queue_size {size} can never hold a batch: "
            f"give at least batch_size {batch_size}",
        )
        return size or 2 * batch_size


@dataclass(frozen=True, kw_only=True)
class FleetConfig(ActorsConfig):
    """Environments, and the server processes that the program starts for them."""

    num_servers: int | None = None
    """Number of server processes. Default: one per core, at most one per environment."""
    pipes_basename: str | None = None
    """Server i listens at {pipes_basename}.{i}, e.g. unix:/tmp/polybeast.
    Default: sockets in a folder of this run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, num_servers=self.num_servers)
        require(
            self.num_servers is None or self.num_servers <= self.num_actors,
            f"num_servers {self.num_servers} leaves servers without an environment: "
            f"give at most as many as num_actors {self.num_actors}",
        )

    def servers(self) -> int:
        """Returns the number of server processes."""
        return self.num_servers or min(self.num_actors, available_cores())


@dataclass(frozen=True, kw_only=True)
class ServedFleetConfig:
    """The running environment servers to learn from."""

    num_actors: int | None = None
    """Number of environments: servers {pipes_basename}.0, .1, ... are asked until exactly this many
    are found. Default: the environments of all servers that are found."""
    pipes_basename: str | None = None
    """Common part of the servers' addresses. Default: that of polybeast_env, in a folder of this
    user."""
    connect_timeout: float = 20.0
    """Seconds to wait for each server to answer at the start."""

    def __post_init__(self) -> None:
        at_least(1, num_actors=self.num_actors)
        above(0, connect_timeout=self.connect_timeout)


@dataclass(frozen=True, kw_only=True)
class ServedEnvConfig:
    """The environment, which the servers decide."""

    env: str | None = None
    """Refuse servers of another environment. Default: learn whatever they serve. With --mode test,
    which needs no servers: the environment to play. Default: that of the run."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """With --mode test: keyword arguments of the environment's constructor as JSON, such as
    '{"size": 8}'. Default: those of the run, if --env is no package.module:factory."""
    num_actions: int | None = None
    """Number of actions; needed only with servers of the original TorchBeast, which do not describe
    their environment."""

    def __post_init__(self) -> None:
        at_least(1, num_actions=self.num_actions)

    @property
    def asked(self) -> EnvSpec:
        """Spec of the environment to evaluate in; its name is empty for that of the run."""
        return EnvSpec(self.env or "", self.env_kwargs)


@dataclass(frozen=True, kw_only=True)
class ServersConfig:
    """Environment servers for a learner in another terminal or on another machine."""

    num_servers: int = 4
    """Number of server processes. About one per core is best."""
    num_actors: int | None = None
    """Number of environments of all servers together. Default: one per server."""
    pipes_basename: str | None = None
    """Server i listens at {pipes_basename}.{i}. Default: sockets in a folder of this user."""

    def __post_init__(self) -> None:
        at_least(1, num_servers=self.num_servers)
        require(
            self.num_actors is None or self.num_actors >= self.num_servers,
            f"num_actors {self.num_actors} leaves servers without an environment: "
            f"give at least as many as num_servers {self.num_servers}",
        )
