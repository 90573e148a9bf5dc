# SPDX-License-Identifier: Apache-2.0
"""Settings of PolyBeast's source: environment servers, inference and the learner's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

    def share(self, learners: int) -> PipelineConfig:
        """Returns the settings of one of several learners that share a batch."""
        size = self.max_learner_queue_size
        return replace(self, max_learner_queue_size=None if size is None else size // learners)


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
    are found; those of --env_servers must have exactly this many. Default: the environments of all
    servers that are found."""
    pipes_basename: str | None = None
    """Common part of the servers' addresses. Default: that of polybeast_env, in a folder of this
    user."""
    env_servers: str | None = None
    """Servers on other machines: HOST:PORT,HOST:PORT with the port of each host's first server,
    whose others follow at the next ports; or a file with one HOST:PORT on a line; or
    dns:///NAME:PORT for a host at each address of a name. Default: servers on this machine."""
    connect_timeout: float = 20.0
    """Seconds to wait for each server to answer at the start."""

    def __post_init__(self) -> None:
        at_least(1, num_actors=self.num_actors)
        above(0, connect_timeout=self.connect_timeout)
        require(
            self.env_servers is None or self.pipes_basename is None,
            "env_servers are on other machines, those of pipes_basename on this one: give either",
        )


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
    listen: str | None = None
    """HOST:PORT for learners on other machines: server i listens at PORT + i. HOST 0.0.0.0 is every
    network of this machine. Default: sockets, for learners on this machine."""

    def __post_init__(self) -> None:
        at_least(1, num_servers=self.num_servers)
        require(
            self.listen is None or self.pipes_basename is None,
            "listen is for learners on other machines, pipes_basename for this one: give either",
        )
        require(
            self.num_actors is None or self.num_actors >= self.num_servers,
            f"num_actors {self.num_actors} leaves servers without an environment: "
            f"give at least as many as num_servers {self.num_servers}",
        )


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Protection of connections between machines. Flags name files, so that no secret is shown by
    ps or recorded.
    """

    insecure: bool = False
    """Use TCP without TLS: whoever is on the network can read and change everything, a token too.
    Only for networks that are protected otherwise, such as a VPN."""

    def _check_pair(self, cert: str | None, key: str | None) -> None:
        require(
            (cert is None) == (key is None),
            "tls_cert and tls_key belong together: give both or neither",
        )

    def _check_insecure(self, has_tls: bool) -> None:
        require(
            not (self.insecure and has_tls),
            "insecure is TCP without TLS: leave it out, or the TLS files",
        )


@dataclass(frozen=True, kw_only=True)
class ServerSecurityConfig(SecurityConfig):
    """Protection of environment servers that listen to other machines."""

    tls_cert: str | None = None
    """File with the certificate of this host (PEM), and any between it and the authority's."""
    tls_key: str | None = None
    """File with the key of --tls_cert (PEM), which nobody else may read."""
    tls_client_ca: str | None = None
    """File with the authority (PEM) that must have signed the certificates of learners: mutual
    TLS. Default: learners need no certificate."""
    token_file: str | None = None
    """File with a token, which nobody else may read: learners must have the same one."""

    def __post_init__(self) -> None:
        self._check_pair(self.tls_cert, self.tls_key)
        self._check_insecure(self.has_tls or self.tls_client_ca is not None)
        require(
            self.tls_client_ca is None or self.has_tls,
            "tls_client_ca needs tls_cert and tls_key: learners check this host in turn",
        )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None

    def check_used(self, listens: bool) -> None:
        """Raises ValueError unless these settings fit servers that listen to other machines, or
        not.
        """
        if not listens:
            require(
                self == type(self)(),
                "insecure, token_file and tls files protect TCP: they need --listen HOST:PORT",
            )
            return
        require(
            self.has_tls or self.insecure,
            "--listen needs tls_cert and tls_key (python -m torchbeast.keys makes them), or "
            "--insecure on a network that is protected otherwise",
        )
        require(
            bool(self.token_file or self.tls_client_ca or self.insecure),
            "--listen needs token_file or tls_client_ca, else anyone could use the environments",
        )


@dataclass(frozen=True, kw_only=True)
class LearnerSecurityConfig(SecurityConfig):
    """Protection of connections to environment servers on other machines."""

    tls_ca: str | None = None
    """File with the authority (PEM) that must have signed the certificates of servers, which must
    name their hosts."""
    tls_cert: str | None = None
    """File with the certificate of this learner (PEM), for servers with --tls_client_ca."""
    tls_key: str | None = None
    """File with the key of this learner's --tls_cert (PEM), which nobody else may read."""
    token_file: str | None = None
    """File with the token of the servers, which nobody else may read."""

    def __post_init__(self) -> None:
        self._check_pair(self.tls_cert, self.tls_key)
        self._check_insecure(self.has_tls or self.tls_cert is not None)
        require(
            self.tls_cert is None or self.has_tls,
            "tls_cert needs tls_ca, the authority of the servers",
        )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_ca is not None

    def check_used(self, reaches_out: bool) -> None:
        """Raises ValueError unless these settings fit servers on other machines, or not."""
        if not reaches_out:
            require(
                self == type(self)(),
                "insecure, token_file and tls files protect TCP: they need --env_servers",
            )
            return
        require(
            self.has_tls or self.insecure,
            "--env_servers needs tls_ca, the authority of the servers' certificates, or "
            "--insecure on a network that is protected otherwise",
        )
