# SPDX-License-Identifier: Apache-2.0
"""Settings of PolyBeast: environment servers, inference, and the learner's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchbeast.collect.config import ActorsConfig
from torchbeast.core.base.checks import (
    Settings,
    above,
    at_least,
    command,
    counted,
    require,
    setting,
)
from torchbeast.envs.spec import EnvOptions, EnvSpec
from torchbeast.errors import UsageError
from torchbeast.fleets.system import allowed_descriptors, available_cores
from torchbeast.servers.addresses import host_and_port

_FILES_OF_A_STREAM = 4  # its connection, and gRPC's wake-up descriptors; 3.25 were counted
_FILES_OF_THE_REST = 200  # of the program and its libraries


def _check_basename(**values: str | None) -> None:
    """Raises ValueError unless every value is a common prefix of sockets, or None."""
    for name, value in values.items():
        require(
            value is None or value.startswith("unix:"),
            f"{name} must begin with unix:, as in unix:/tmp/polybeast, got {value!r}; for TCP use "
            "--listen of polybeast_env and --env_servers of polybeast_learner",
        )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Settings):
    """Inference, and the queue of rollouts between environment servers and learner."""

    num_inference_threads: int | None = setting(None, bounds=(at_least, 1))
    """Inference threads, each with its own copy of the network. Default: 2 with a GPU, else one per
    four cores, at least one; one if PyTorch's operations use all cores (see --torch_threads)."""
    max_learner_queue_size: int | None = setting(None, bounds=(at_least, 1))
    """Maximum number of rollouts that wait for the learner. Longer queues allow older data.
    Default: two batches."""
    min_streams: int | None = setting(None, bounds=(at_least, 1))
    """End the run if fewer streams to environment servers stay connected for a minute, or if fewer
    are left because streams whose environments failed repeatedly were retired. Default: half of the
    streams; with --listen one. With --listen the run also waits for as many at its start."""

    def check_enough(self, count: int) -> None:
        """Raises UsageError if min_streams is more than the `count` streams of the servers."""
        needed = self.min_streams or 0
        if needed > count:
            raise UsageError(
                f"min_streams {needed} is more than the {counted(count, 'stream')} of the servers: "
                f"use at most {count}, or more servers"
            )

    def queue_size(self, batch_size: int) -> int:
        """Returns how many rollouts may wait; raises ValueError if a batch does not fit."""
        size = self.max_learner_queue_size
        require(
            size is None or size >= batch_size,
            f"max_learner_queue_size {size} can never hold a batch: use at least batch_size "
            f"{batch_size}",
        )
        return size or 2 * batch_size

    def share(self, learners: int, own: int, count: int) -> PipelineConfig:
        """Returns the settings of one of several learners that share a batch.

        own, count: number of streams of this learner, and of all learners. Shares of min_streams
        are rounded up, so that all learners together never continue with fewer.
        """
        size = self.max_learner_queue_size
        needed = -(-(self.min_streams or 0) * own // count)
        return replace(
            self,
            max_learner_queue_size=None if size is None else size // learners,
            min_streams=needed or None,
        )


@dataclass(frozen=True, kw_only=True)
class FleetConfig(ActorsConfig):
    """The environments, and the server processes that the program starts for them."""

    num_servers: int | None = None
    """Server processes. Default: one per core, at most one per environment."""
    pipes_basename: str | None = setting(None, "rank", "incidental", bounds=(_check_basename,))
    """Server i listens at {pipes_basename}.{i}, for example unix:/tmp/polybeast. Default: sockets
    in the run's own folder."""

    of_processes = "num_servers"

    def servers(self) -> int:
        """Returns the number of server processes."""
        return self.num_servers or min(self.environments(), available_cores())


@dataclass(frozen=True, kw_only=True)
class ServedFleetConfig(Settings):
    """The running environment servers that the learner uses."""

    num_envs: int | None = setting(None, "served", bounds=(at_least, 1))
    """Expected total number of environments: exactly this many on servers, and at least this many
    on hosts that dial in (--listen). Default: use all environments."""
    pipes_basename: str | None = setting(None, "rank", "incidental", bounds=(_check_basename,))
    """Common prefix of the servers' addresses. Default: a path in a private folder of this user, as
    in polybeast_env."""
    env_servers: str | None = setting(None, "connection")
    """Servers on other machines: HOST:PORT,HOST:PORT with the port of each host's first server; a
    host's other servers use the ports after it. Default: servers on this machine."""
    listen: str | None = setting(None, "connection")
    """HOST:PORT at which hosts dial in (polybeast_env --learner) because the learner cannot reach
    them. HOST 0.0.0.0 means every network of this machine, IPv4 and IPv6. The run starts with the
    first host, or once the hosts together have --num_envs environments and --min_streams streams;
    with several learners, once each has a host."""
    connect_timeout: float = setting(20.0, "incidental", bounds=(above, 0))
    """Seconds to wait at startup for each server to answer, or for hosts to dial in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_way(
            pipes_basename=self.pipes_basename, env_servers=self.env_servers, listen=self.listen
        )


@dataclass(frozen=True, kw_only=True)
class ServedEnvConfig(Settings):
    """The environment. In training the servers decide it."""

    env: str | None = setting(None, "task", "served")
    """Refuse servers that serve another environment; with --mode test, which does not need servers,
    play this one. Default: accept any; with --mode test, the run's."""
    env_kwargs: Mapping[str, Any] = setting(dict, "task", "served")
    """With --mode test, --eval_every, --callback or --hindsight_share, whose environments run on
    this machine: keyword arguments of the environment's constructor as JSON, such as '{"size": 8}'.
    Default: the run's arguments, unless --env is a package.module:factory."""
    num_actions: int | None = setting(None, bounds=(at_least, 1))
    """Number of actions. Needed only with servers of the original TorchBeast (2019), which do not
    describe their environment."""
    task_returns: tuple[float, ...] = ()
    """For each task of the servers, the two returns that are scaled to 0 and 1, as in polybeast."""
    selfplay: str | None = None
    """The folder for earlier versions of the agent, if the servers have --selfplay. The same folder
    must be reached from their machines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.asked  # checked

    @property
    def asked(self) -> EnvSpec:
        """Spec of the environment to evaluate in; an empty name means the run's environment."""
        options = EnvOptions(task_returns=self.task_returns, selfplay=self.selfplay)
        return EnvSpec(self.env or "", self.env_kwargs, options=options)


@dataclass(frozen=True, kw_only=True)
class ServersConfig(FleetConfig):
    """Environment servers for a learner in another terminal or on another machine."""

    num_envs: int | None = None
    """Total number of environments. Default: one per server if you give --num_servers, else the
    default of polybeast."""
    pipes_basename: str | None = setting(None, "rank", "incidental", bounds=(_check_basename,))
    """Server i listens at {pipes_basename}.{i}. Default: sockets in a private folder of this
    user."""
    listen: str | None = setting(None, "connection")
    """HOST:PORT for learners on other machines: server i listens at PORT + i. HOST 0.0.0.0 means
    every network of this machine, IPv4 and IPv6. Default: sockets, for learners on this machine."""
    learner: str | None = None
    """HOST:PORT of a learner on another machine (polybeast_learner --listen) that cannot reach this
    host, so that the host dials in. With several learners: HOST:PORT,HOST:PORT. It reconnects, with
    growing pauses, until the learner's run has ended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_way(pipes_basename=self.pipes_basename, listen=self.listen, learner=self.learner)

    def learners(self) -> list[str]:
        """Returns HOST:PORT of each learner to dial in to; raises UsageError for other text."""
        named = [] if self.learner is None else self.learner.split(",")
        return [":".join(map(str, host_and_port(each.strip()))) for each in named]

    def environments(self) -> int:
        """Returns the number of environments."""
        return self.num_envs or self.num_servers or ActorsConfig().environments()


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Security of connections between machines. Secrets are read from files, so that they appear
    neither in ps nor in a run's records. Some flags are for the listening side, others for the
    connecting side.
    """

    insecure: bool = setting(False, "connection")
    """Use TCP without TLS. Anyone on the network can then read and change everything, including the
    token. Use it only on networks that are already protected, for example by a VPN."""
    tls_ca: str | None = setting(None, "connection")
    """Connecting side: PEM file of the certificate authority that signed the other side's
    certificate. That certificate must contain its host name."""
    tls_cert: str | None = setting(None, "connection")
    """PEM file with this side's certificate and any intermediate certificates. The listening side
    always needs a certificate, which must contain its host name. The connecting side needs one only
    if the other side has --tls_client_ca."""
    tls_key: str | None = setting(None, "connection")
    """PEM file with the private key of --tls_cert. Other users must not be able to read it."""
    tls_client_ca: str | None = setting(None, "connection")
    """Listening side, for mutual TLS: PEM file of the certificate authority that signed the
    clients' certificates. Default: clients need no certificate."""
    token_file: str | None = setting(None, "connection")
    """File with a secret token, the same on both sides. Other users must not be able to read it."""

    def __post_init__(self) -> None:
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "tls_cert and tls_key belong together: set both or neither",
        )
        files = self.tls_ca, self.tls_cert, self.tls_client_ca
        require(
            not self.insecure or not any(files),
            "insecure means TCP without TLS: remove it, or the TLS files",
        )

    def check_unused(self, flags: str) -> None:
        """Raises ValueError if any of them is given. flags: names flags that would allow them."""
        require(
            self == type(self)(),
            f"insecure, token_file and tls files protect TCP: they need {flags}",
        )

    def listening(self) -> SecurityConfig:
        """Returns the protection of --listen; raises ValueError if it is insufficient."""
        require(
            self.tls_ca is None,
            "tls_ca is for the connecting side: this side listens and takes tls_client_ca",
        )
        require(
            self.tls_cert is not None or self.insecure,
            f"listen needs tls_cert and tls_key ({command('keys')} makes them), or --insecure on "
            "a network that is already protected",
        )
        require(
            bool(self.token_file or self.tls_client_ca or self.insecure),
            "listen needs token_file or tls_client_ca, else anyone could connect",
        )
        return self

    def connecting(self, flag: str, whom: str) -> SecurityConfig:
        """Returns the protection of a side that connects; raises ValueError if it is insufficient.

        flag: the flag with the other side's address. whom: who the other side is, possessive.
        """
        require(
            self.tls_client_ca is None,
            "tls_client_ca is for the listening side: this side connects and takes tls_ca",
        )
        require(
            self.tls_ca is not None or self.insecure,
            f"{flag} needs tls_ca, {whom} CA certificate, or --insecure if the network is "
            "already protected",
        )
        return self


def _one_way(**given: str | None) -> None:
    """Raises ValueError if more than one of these flags is given."""
    flags = [f"--{name}" for name, value in given.items() if value is not None]
    require(len(flags) < 2, f"{' and '.join(flags)} are different ways to connect: use one of them")


def most_streams() -> int:
    """Returns how many streams a learner may have, because gRPC ends the process if it runs out of
    descriptors.
    """
    return max(1, (allowed_descriptors() - _FILES_OF_THE_REST) // _FILES_OF_A_STREAM)


def check_streams(count: int) -> None:
    """Raises UsageError if this process may not have this number of streams."""
    if count > most_streams():
        raise UsageError(
            f"{count:,} streams need {_FILES_OF_A_STREAM * count + _FILES_OF_THE_REST:,} files and "
            f"connections, but this process may have {allowed_descriptors():,} open: raise the "
            "limit (ulimit -n), or serve more environments in a stream (fewer num_servers)"
        )
