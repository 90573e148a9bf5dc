# SPDX-License-Identifier: Apache-2.0
"""Asks environment servers for a description of what they serve.

The learner's network is made from their descriptions, so nobody has to type sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import libtorchbeast
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    observation_space_from_json,
    space_from_json,
)
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.servers.addresses import server_addresses, socket_path
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials, explain

_log = logging.getLogger("torchbeast.hosts")

_FIRST_PATIENCE_S = 0.5  # limit of the first request; doubled each time
_MOST_HOSTS = 64  # asked at the same time; each takes a thread and a connection

# The entries in which all descriptions must agree.
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
"""What libtorchbeast.describe returns."""


@dataclass(frozen=True)
class ServerFleet:
    """Servers that serve the same environment."""

    env: EnvSpec  # as far as described; its name is empty if unknown
    observation_space: Any  # nest of ArraySpec as on the wire, of one environment
    action_space: ActionSpace | None  # None: not described, by servers of the original
    frame_stack: int
    stream_addresses: list[str]  # server of each stream; of a host that dials in, what to call it
    envs_per_stream: list[int]  # environments of each stream
    credentials: libtorchbeast.Credentials | None = None  # for servers on other machines
    descriptions: Mapping[str, Any] = field(default_factory=dict)  # JSON, by address
    stream_hosts: Sequence[str] = ()  # of each stream, if hosts dial in

    @property
    def num_envs(self) -> int:
        """Number of environments of all streams."""
        return sum(self.envs_per_stream)

    def share(self, rank: int, size: int) -> ServerFleet:
        """Returns the fleet of one of several learners: consecutive streams, none of which another
        has.

        Raises UsageError for fewer streams than learners.
        """
        count = len(self.stream_addresses)
        if count < size:
            raise UsageError(
                f"{size} learners need a stream of environments each, but the servers have {count} "
                f"streams: start at least {size} servers (polybeast_env --num_servers), or fewer "
                "learners (torchrun --nproc_per_node)"
            )
        own = slice(count * rank // size, count * (rank + 1) // size)
        return replace(
            self,
            stream_addresses=self.stream_addresses[own],
            envs_per_stream=self.envs_per_stream[own],
        )


def find(
    hosts: Sequence[str],
    num_actors: int | None,
    timeout: float,
    security: SecurityConfig | None = None,
    check_goes_on: Callable[[], None] = lambda: None,
) -> ServerFleet:
    """Asks all servers of these hosts.

    If num_actors is None, one host suffices: the run begins without those that do not answer, or
    refuse, after a warning.

    hosts: each named by the address of its first server, or the basename of its sockets.
    num_actors: the number of environments that they must have in all; None: any.
    timeout: seconds to wait for each server. security: None for servers on this machine.
    check_goes_on: raises RunError to give up waiting.

    Raises UsageError for another number, a server that is named twice and unusable files; RunError
    when a host that is needed does not answer, and when two serve different environments.
    """
    asking = Asking(timeout, security, check_goes_on)
    with ThreadPoolExecutor(min(len(hosts), _MOST_HOSTS)) as threads:
        answers = {name: threads.submit(_servers_of, name, num_actors, asking) for name in hosts}
    check_goes_on()
    found = _answered(answers, all_needed=num_actors is not None)
    fleet = fleet_of(found, asking.credentials)
    if num_actors not in (None, fleet.num_envs):
        raise UsageError(
            f"the servers of {', '.join(hosts)} serve {fleet.num_envs} environments, but "
            f"--num_actors is {num_actors}: give --num_actors {fleet.num_envs}, or leave it out"
        )
    return fleet


def _answered(
    answers: Mapping[str, Future[dict[str, Description]]], all_needed: bool
) -> dict[str, Description]:
    """Returns the servers of hosts by address; raises the errors of those that have not answered if
    all are needed, or none has.
    """
    found: dict[str, Description] = {}
    away: dict[str, RunError] = {}
    for name, answer in answers.items():
        if name in found:
            raise UsageError(
                f"{name} is on a host that you have named already: name each host once, by the "
                "port of its first server"
            )
        try:
            found |= answer.result()
        except RunError as error:
            away[name] = error
    if away and (all_needed or not found):
        raise RunError("\n".join(map(str, away.values())))
    for name, why in away.items():
        _log.warning("starting without the host %s: %s", name, why)
    return found


def _servers_of(host: str, num_actors: int | None, asking: Asking) -> dict[str, Description]:
    """Returns what all servers of a host say, by address; raises RunError if one is silent.

    Each says how many were started together. Servers of the original do not: on this machine there
    are as many as have num_actors environments, elsewhere and without num_actors one.
    """
    found: dict[str, Description] = {}
    environments, has_another = 0, True
    while has_another:
        address = server_addresses(host, len(found) + 1)[-1]
        said = found[address] = asking.ask(address)
        environments += said["num_envs"] * said["num_streams"]
        is_here = socket_path(address) is not None
        of_original = is_here and environments < (num_actors or 0)
        has_another = len(found) < said["num_servers"] if said["num_servers"] else of_original
    return found


def fleet_of(
    found: Mapping[str, dict[str, Any]], credentials: libtorchbeast.Credentials | None = None
) -> ServerFleet:
    """Returns the fleet of servers with these descriptions, by address.

    Raises RunError when they do not serve the same environment, or their description is invalid.
    """
    (first_address, first), *others = found.items()
    for address, description in others:
        check_same(first_address, first, address, description)
    streams = [(a, d) for a, d in found.items() for _ in range(d["num_streams"])]
    try:
        return ServerFleet(
            env=_env(first),
            observation_space=_observation_space(first),
            action_space=_action_space(first),
            frame_stack=first["frame_stack"],
            stream_addresses=[address for address, _ in streams],
            envs_per_stream=[description["num_envs"] for _, description in streams],
            credentials=credentials,
            descriptions=found,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the description from {first_address} is not valid: {error}") from None


class Asking:
    """Asks servers. Several threads may use it at once, each for one server after the other."""

    def __init__(
        self,
        timeout: float,
        security: SecurityConfig | None,
        check_goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the files of credentials. The arguments are those of `find`."""
        self.timeout = timeout
        self._security, self._check_goes_on = security, check_goes_on
        self.credentials = None if security is None else credentials(security)

    def ask(self, address: str) -> Description:
        """Requests a description until the timeout; a signal is noticed between two requests."""
        deadline, patience = time.monotonic() + self.timeout, _FIRST_PATIENCE_S
        while True:
            self._check_goes_on()
            left = deadline - time.monotonic()
            try:
                limit = max(0.0, min(patience, left))
                return libtorchbeast.describe(address, limit, self.credentials)
            except TimeoutError:
                if self._security is not None:
                    explain(address, self._security)  # takes seconds
                if left <= patience or time.monotonic() >= deadline:
                    raise _no_answer(address, f"waited {self.timeout:g} s") from None
            except PermissionError as error:
                raise RunError(str(error)) from None
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise _no_answer(address, str(error)) from None
            patience *= 2

    def status(self, address: str) -> dict[str, Any]:
        """Returns how busy a server is, or which hosts have joined a learner; raises RunError if it
        does not tell.
        """
        try:
            return libtorchbeast.server_status(address, self.timeout, self.credentials)
        except (OSError, ValueError) as error:
            if self._security is not None:
                explain(address, self._security)
            raise RunError(f"{address} does not report its status ({error})") from None


def _no_answer(address: str, why: str) -> RunError:
    start = "start servers there (python -m torchbeast.polybeast_env)"
    others = " or name those of other machines (--env_servers, --listen)"
    is_here = socket_path(address) is not None
    return RunError(
        f"no environment server answers at {address} ({why}): {start}{others * is_here}"
    )


def check_same(address: str, ours: Description, other: str, theirs: Description) -> None:
    """Raises RunError when the servers at two addresses, or of two hosts, serve different
    environments.
    """
    for key in _ALIKE:
        if ours.get(key) != theirs.get(key):
            raise RunError(
                f"the servers at {address} and {other} must serve the same, "
                f"but their {key} is {ours.get(key)!r} and {theirs.get(key)!r}"
            )


def _action_space(description: dict[str, Any]) -> ActionSpace | None:
    said = description["action_space"]
    return None if said is None else space_from_json(said)


def _observation_space(description: dict[str, Any]) -> Any:
    """Returns the nest of ArraySpec, with ranges of values if the server describes them."""
    said, specs = description.get("observation_space"), _to_specs(description["observation"])
    return specs if said is None else observation_space_from_json(said, specs)


def _env(description: dict[str, Any]) -> EnvSpec:
    """Returns the served environment.

    Servers of earlier versions send no keyword arguments, those of the original no options. The
    info keywords are those that come with steps, whatever the options say.
    """
    said = description.get("options") or {}
    if not isinstance(said, dict):
        raise ValueError(f"its options must be a JSON object, got {said!r}")
    kwargs = said.get("env_kwargs", {})
    options = {**said, "info_keywords": description.get("info_keywords", ())}
    return EnvSpec.from_json({"name": description["env_id"], "kwargs": kwargs, "options": options})


def _to_specs(nest: Any) -> Any:
    """Converts leaves (dtype, shape) to ArraySpec."""
    if isinstance(nest, dict):
        return {key: _to_specs(nest[key]) for key in sorted(nest)}
    if len(nest) == 2 and isinstance(nest[0], str):
        return ArraySpec(tuple(nest[1]), nest[0])
    return tuple(_to_specs(item) for item in nest)
