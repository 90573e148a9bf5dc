# SPDX-License-Identifier: Apache-2.0
"""Queries environment servers for a description of what they serve.

The learner makes its network from these descriptions, so users need not specify sizes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import libtorchbeast
from torchbeast.core.base.checks import command
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs import spaces
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.servers.addresses import server_addresses, socket_path
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials, explain

_log = logging.getLogger("torchbeast.hosts")

_FIRST_PATIENCE_S = 0.5  # time limit of the first request; doubled for each retry
_LONGEST_PATIENCE_S = 4.0  # while nobody accepts a connection
_MOST_HOSTS = 64  # to query at the same time; each takes a thread and a connection

# The entries that must be equal in all descriptions.
_ALIKE = (
    "env_id",
    "observation",
    "action_space",
    "observation_space",
    "frame_stack",
    "options",
    "info_keywords",
)


Description = dict[str, Any]
"""The result of libtorchbeast.describe."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The streams of servers to a learner."""

    stream_addresses: list[str]  # server of each stream, or a name if its host dials in
    envs_per_stream: list[int]  # environments of each stream
    credentials: libtorchbeast.Credentials | None = None  # for servers on other machines

    @property
    def num_envs(self) -> int:
        """Number of environments of all streams."""
        return sum(self.envs_per_stream)


@dataclass(frozen=True, kw_only=True)
class ServerFleet(Streams):
    """Servers that serve the same environment."""

    env: EnvSpec  # as described; its name is empty if unknown
    observation_space: Any  # nest of ArraySpec as on the wire, of one environment
    action_space: spaces.ActionSpace | None  # None: not described (servers of TorchBeast 2019)
    frame_stack: int
    descriptions: Mapping[str, Any]  # JSON, by address
    stream_hosts: Sequence[str] = ()  # of each stream, if hosts dial in

    def share(self, rank: int, size: int) -> ServerFleet:
        """Returns the fleet of one of several learners, which divide the streams among themselves.

        Raises UsageError if there are fewer streams than learners.
        """
        count = len(self.stream_addresses)
        if count < size:
            raise UsageError(
                f"{size} learners need one stream of environments each, but the servers have "
                f"{count} streams: start at least {size} servers (polybeast_env --num_servers), or "
                "fewer learners (torchrun --nproc_per_node)"
            )
        part = slice(count * rank // size, count * (rank + 1) // size)
        return replace(
            self,
            stream_addresses=self.stream_addresses[part],
            envs_per_stream=self.envs_per_stream[part],
        )


def find_servers(hosts: Sequence[str], num_envs: int | None, asking: Asking) -> ServerFleet:
    """Queries all servers of these hosts.

    If num_envs is None, one host suffices: the run starts, with a warning, without hosts that do
    not answer or that refuse it.

    hosts: each named by the address of its first server, or by the basename of its sockets.
    num_envs: total number of environments that they must have; None: any.

    Raises UsageError for another number of environments, and for a server that is named twice.
    Raises RunError if a necessary host does not answer, or if two hosts serve different
    environments.
    """
    with ThreadPoolExecutor(min(len(hosts), _MOST_HOSTS)) as threads:
        answers = {name: threads.submit(_servers_of, name, num_envs, asking) for name in hosts}
    asking.check_goes_on()
    descriptions = _answered(answers, all_needed=num_envs is not None)
    fleet = replace(fleet_of(descriptions), credentials=asking.credentials)
    if num_envs not in (None, fleet.num_envs):
        raise UsageError(
            f"the servers of {', '.join(hosts)} serve {fleet.num_envs} environments, but "
            f"num_envs is {num_envs}: use num_envs {fleet.num_envs}, or remove it"
        )
    return fleet


def _answered(
    answers: Mapping[str, Future[dict[str, Description]]], all_needed: bool
) -> dict[str, Description]:
    """Returns the servers of all hosts by address. Raises the errors of hosts that did not answer
    if all hosts are needed, or if none answered.
    """
    descriptions: dict[str, Description] = {}
    away: dict[str, RunError] = {}
    for name, answer in answers.items():
        if name in descriptions:
            raise UsageError(
                f"{name} is on a host that is already listed: list each host once, with the port "
                "of its first server"
            )
        try:
            descriptions |= answer.result()
        except RunError as error:
            away[name] = error
    if away and (all_needed or not descriptions):
        raise RunError("\n".join(map(str, away.values())))
    for name, why in away.items():
        _log.warning("starting without the host %s: %s", name, why)
    return descriptions


def _servers_of(host: str, num_envs: int | None, asking: Asking) -> dict[str, Description]:
    """Returns the descriptions of all servers of a host by address; raises RunError if one does not
    answer.

    Each server reports how many servers were started together. Servers of TorchBeast 2019 do not:
    on this machine it queries servers until they have num_envs environments; on other machines,
    or without num_envs, it queries one.
    """
    descriptions: dict[str, Description] = {}
    environments, has_another = 0, True
    while has_another:
        address = server_addresses(host, len(descriptions) + 1)[-1]
        description = descriptions[address] = asking.ask(address)
        environments += description["num_envs"] * description["num_streams"]
        is_here = socket_path(address) is not None
        of_original = is_here and environments < (num_envs or 0)
        total = description["num_servers"]
        has_another = len(descriptions) < total if total else of_original
    return descriptions


def fleet_of(descriptions: Mapping[str, dict[str, Any]]) -> ServerFleet:
    """Returns the fleet of servers with these descriptions, by address.

    Raises RunError if they do not serve the same environment, or if a description is invalid.
    """
    (first_address, first), *others = descriptions.items()
    for address, description in others:
        check_same(first_address, first, address, description)
    streams = [(a, d) for a, d in descriptions.items() for _ in range(d["num_streams"])]
    actions = first["action_space"]
    try:
        return ServerFleet(
            env=_env(first),
            observation_space=_observation_space(first),
            action_space=None if actions is None else _space(actions, spaces.ActionLeaf),
            frame_stack=first["frame_stack"],
            stream_addresses=[address for address, _ in streams],
            envs_per_stream=[description["num_envs"] for _, description in streams],
            descriptions=descriptions,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the description from {first_address} is not valid: {error}") from None


@dataclass
class Asking:
    """Queries servers. Several threads may use it at the same time."""

    timeout: float  # seconds to wait for each server
    security: SecurityConfig | None  # None: for servers on this machine
    check_goes_on: Callable[[], None] = lambda: None  # raises RunError to stop waiting

    def __post_init__(self) -> None:
        """Reads the files with credentials; raises UsageError for files that cannot be used."""
        self.credentials = None if self.security is None else credentials(self.security)

    def ask(self, address: str) -> Description:
        """Requests a description, repeatedly until the timeout; notices signals in between."""
        deadline, patience = time.monotonic() + self.timeout, _FIRST_PATIENCE_S
        while True:
            self.check_goes_on()
            left = deadline - time.monotonic()
            try:
                limit = max(0.0, min(patience, left))
                return libtorchbeast.describe(address, limit, self.credentials)
            except TimeoutError as error:
                if self.security is not None:
                    explain(address, self.security)  # takes seconds
                if left <= patience or time.monotonic() >= deadline:
                    raise _no_answer(address, f"waited {self.timeout:g} s") from None
                # A server that has to make an environment first may take longer.
                is_there = "accepts connections" in str(error)
                patience = min(2 * patience, math.inf if is_there else _LONGEST_PATIENCE_S)
            except PermissionError as error:
                raise RunError(str(error)) from None
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise _no_answer(address, str(error)) from None

    def status(self, address: str) -> dict[str, Any]:
        """Returns how busy a server is, or which hosts have joined a learner; raises RunError if
        there is no answer.
        """
        try:
            return libtorchbeast.server_status(address, self.timeout, self.credentials)
        except (OSError, ValueError) as error:
            if self.security is not None:
                explain(address, self.security)
            raise RunError(f"{address} did not report its status ({error})") from None


def _no_answer(address: str, why: str) -> RunError:
    is_here = socket_path(address) is not None
    program = command("polybeast_env") if is_here else "python -m torchbeast.polybeast_env"
    start = f"start servers there ({program})"
    others = " or select servers on other machines (--env_servers, --listen)"
    return RunError(
        f"no environment server answers at {address} ({why}): {start}{others * is_here}"
    )


def check_same(address: str, ours: Description, other: str, theirs: Description) -> None:
    """Raises RunError if the servers at two addresses, or of two hosts, serve different
    environments.
    """
    for key in _ALIKE:
        if ours.get(key) != theirs.get(key):
            raise RunError(
                f"the servers at {address} and {other} must have the same environment, but their "
                f"{key} is {ours.get(key)!r} and {theirs.get(key)!r}"
            )


def _observation_space(description: dict[str, Any]) -> Any:
    """Returns the nest of ArraySpec, with value ranges if the server describes them."""
    specs, described = _to_specs(description["observation"]), description.get("observation_space")
    space = specs if described is None else _space(described, spaces.ArraySpec)
    if spaces.without_values(space) != specs:
        raise ValueError(f"its observation_space is {space}, but its observations are {specs}")
    return space


def _space(described: Any, kind: Any) -> Any:
    """Returns the space; raises ValueError unless its leaves are of this kind."""
    space = spaces.space_from_json(described)
    for leaf in flatten(space):
        if not isinstance(leaf, kind):
            raise ValueError(f"its spaces are mixed up: {leaf}")
    return space


def _env(description: dict[str, Any]) -> EnvSpec:
    """Returns the served environment.

    Servers of TorchBeast 2019 do not send options. The info keywords come from the steps, not from
    the options. The learner's own flags decide where it writes versions for self-play.
    """
    recorded = description.get("options") or {}
    if not isinstance(recorded, dict):
        raise ValueError(f"its options must be a JSON object, got {recorded!r}")
    kwargs = recorded.get("env_kwargs", {})
    keywords = description.get("info_keywords", ())
    options = {**recorded, "info_keywords": keywords, "selfplay": None}
    return EnvSpec.from_json({"name": description["env_id"], "kwargs": kwargs, "options": options})


def _to_specs(nest: Any) -> Any:
    """Converts leaves (dtype, shape) to ArraySpec."""
    if isinstance(nest, dict):
        return {key: _to_specs(nest[key]) for key in sorted(nest)}
    if len(nest) == 2 and isinstance(nest[0], str):
        return spaces.ArraySpec(tuple(nest[1]), nest[0])
    return tuple(_to_specs(item) for item in nest)
