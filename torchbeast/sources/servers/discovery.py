# SPDX-License-Identifier: Apache-2.0
"""Asks environment servers for a description of what they serve.

The learner's network is made from their descriptions, so nobody has to type sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import libtorchbeast
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    action_space_from_json,
    observation_space_from_json,
)
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.addresses import (
    host_and_port,
    server_addresses,
    socket_path,
)
from torchbeast.sources.servers.asking_together import asked_together
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.credentials import learner_credentials
from torchbeast.sources.servers.handshake import client_tls, explain

_log = logging.getLogger("torchbeast.hosts")

_FIRST_PATIENCE_S = 0.5  # limit of the first request; doubled each time

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


def _never() -> bool:
    return False


class NoAnswerError(RunError):
    """No environment server answers at an address."""


Description = dict[str, Any]
"""What libtorchbeast.describe returns."""


@dataclass(frozen=True)
class Fleet:
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

    def share(self, rank: int, size: int) -> Fleet:
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


def ask_all(
    addresses: Iterable[str], timeout: float, stopped: Callable[[], bool] = _never
) -> Fleet:
    """Returns the fleet at these addresses.

    Raises RunError when a server does not answer, or serves another environment than the others.
    """
    asking = Asking(timeout, stopped)
    return fleet_of({address: asking.ask(address) for address in addresses})


def find(
    basename: str, num_actors: int | None, timeout: float, stopped: Callable[[], bool] = _never
) -> Fleet:
    """Asks servers `<basename>.0`, `.1`, ... until `num_actors` environments are found.

    num_actors: None: until no more servers are found. timeout: seconds to wait for each server.
    stopped: returns true once the run ends, which gives up waiting.

    Raises UsageError when the servers have more environments than `num_actors`; RunError when they
    have fewer, or do not serve the same environment.
    """
    asking = Asking(timeout, stopped)
    found: dict[str, dict[str, Any]] = {}
    while (count := sum(map(_num_envs, found.values()))) != num_actors:
        if num_actors is not None and count > num_actors:
            raise _too_many(basename, len(found), count, num_actors)
        address = server_addresses(basename, len(found) + 1)[-1]
        if num_actors is None and not _is_expected(address, found):
            break
        try:
            found[address] = asking.ask(address)
        except RunError as error:
            raise _too_few(error, found, count, num_actors) from None
    return fleet_of(found)


def find_on(
    hosts: Sequence[str],
    num_actors: int | None,
    timeout: float,
    security: LearnerSecurityConfig,
    stopped: Callable[[], bool] = _never,
) -> Fleet:
    """Asks the servers of these hosts, each named by the address of its first server.

    If num_actors is None, one host suffices: the run begins without those that do not answer, or
    refuse, after a warning.

    num_actors: the number of environments that they must have in all; None: any.

    Raises UsageError for another number, a server that is named twice and unusable files; RunError
    when a host that is needed does not answer, and when two serve different environments.
    """
    halted = threading.Event()
    asking = Asking(timeout, halted.is_set, security)

    def halt_if_stopped() -> None:
        if stopped():
            halted.set()

    answers = asked_together(lambda name: host_at(name, asking), hosts, halt_if_stopped)
    if halted.is_set():
        raise RunError("it was stopped before the run began")
    found = _servers(answers, all_needed=num_actors is not None)
    fleet = fleet_of(found, asking.credentials)
    if num_actors not in (None, fleet.num_envs):
        raise UsageError(
            f"the servers of {', '.join(hosts)} serve {fleet.num_envs} environments, but "
            f"--num_actors is {num_actors}: give --num_actors {fleet.num_envs}, or leave it out"
        )
    return fleet


def _servers(
    answers: Mapping[str, Callable[[], dict[str, Description]]], all_needed: bool
) -> dict[str, Description]:
    """Returns the servers of hosts by address; raises the error of one that has not answered if all
    are needed, or none has.
    """
    found: dict[str, Description] = {}
    away: dict[str, RunError] = {}
    for name, answer in answers.items():
        check_not_named(name, found)
        try:
            found |= answer()
        except RunError as error:
            away[name] = error
    if away and (all_needed or not found):  # a refusal says more than silence
        raise min(away.values(), key=lambda error: isinstance(error, NoAnswerError))
    for name, why in away.items():
        _log.warning("the run begins without the host %s: %s", name, why)
    return found


def fleet_of(
    found: Mapping[str, dict[str, Any]], credentials: libtorchbeast.Credentials | None = None
) -> Fleet:
    """Returns the fleet of servers with these descriptions, by address.

    Raises RunError when they do not serve the same environment.
    """
    (first_address, first), *others = found.items()
    for address, description in others:
        check_same(first_address, first, address, description)
    streams = [(a, d) for a, d in found.items() for _ in range(d["num_streams"])]
    return Fleet(
        env=_env(first_address, first),
        observation_space=_observation_space(first_address, first),
        action_space=_action_space(first_address, first),
        frame_stack=first["frame_stack"],
        stream_addresses=[address for address, _ in streams],
        envs_per_stream=[description["num_envs"] for _, description in streams],
        credentials=credentials,
        descriptions=found,
    )


def host_at(name: str, asking: Asking) -> dict[str, Description]:
    """Returns what all servers of a host say, by address; raises RunError if one is silent."""
    first = asking.ask(name)
    others = server_addresses(name, max(1, first["num_servers"]))[1:]
    _check_first(name, first, others, asking)
    return {name: first} | {address: asking.ask(address) for address in others}


def _check_first(name: str, said: Description, others: Sequence[str], asking: Asking) -> None:
    """Raises UsageError if the address is that of a host's second server, or of one after it.

    Then the servers that answer, one port after the other, are as many as were started together,
    but some of them are at ports before the one that was named.
    """
    count = said["num_servers"]
    after = list(itertools.takewhile(asking.answers, others))
    if len(after) == len(others):
        return
    host, port = host_and_port(name)
    ports = range(port - 1, max(0, port - count - 1), -1)
    before = list(itertools.takewhile(asking.answers, (f"{host}:{p}" for p in ports)))
    if len(before) + 1 + len(after) == count:
        raise UsageError(
            f"{name} is not the first of its host's {count} servers: name the host by the first "
            f"one's port, {before[-1]}"
        )


def check_not_named(name: str, found: Mapping[str, Description]) -> None:
    """Raises UsageError when a server at the address was found."""
    if name in found:
        raise UsageError(
            f"{name} belongs to a host that is named before it: name each host once, by the port "
            "of its first server"
        )


def _is_expected(address: str, found: dict[str, dict[str, Any]]) -> bool:
    """Returns whether to ask for another server at the address.

    Servers send how many were started together, some of which may not serve yet. Servers of the
    original do not: another is expected if something listens at the address.
    """
    told = max((description["num_servers"] for description in found.values()), default=1)
    return len(found) < told or listens(address)


def listens(address: str) -> bool:
    """Returns whether a process accepts connections at the address at this moment."""
    path = socket_path(address)
    if path is None:
        return False
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def _too_many(basename: str, servers: int, count: int, num_actors: int) -> UsageError:
    return UsageError(
        f"the servers {basename}.0 to .{servers - 1} serve {count} environments, "
        f"but --num_actors is {num_actors}: give --num_actors {count}, or leave it out"
    )


def _too_few(
    error: RunError, found: dict[str, dict[str, Any]], count: int, num_actors: int | None
) -> RunError:
    wanted = "" if num_actors is None else f" of --num_actors {num_actors}"
    told = f"; {count}{wanted} environments were found" if found or wanted else ""
    return RunError(
        f"{error}{told}: start {'more ' * bool(found)}servers "
        "(python -m torchbeast.polybeast_env), or give their --pipes_basename"
    )


class Asking:
    """Asks servers. Several threads may use it at once, each for one server after the other."""

    def __init__(
        self,
        timeout: float,
        stopped: Callable[[], bool] = _never,
        security: LearnerSecurityConfig | None = None,
    ) -> None:
        """Reads the files of credentials.

        timeout: seconds to wait for each server. security: None for servers on this machine.
        """
        self.timeout = timeout
        self._stopped, self._security = stopped, security
        self.credentials = None if security is None else learner_credentials(security)
        self._tls = None if security is None else client_tls(security)

    def answers(self, address: str) -> bool:
        """Returns whether a server answers at once."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            libtorchbeast.describe(address, _FIRST_PATIENCE_S, self.credentials)
            return True
        return False

    def ask(self, address: str) -> dict[str, Any]:
        """Requests a description until the timeout; a signal is noticed between two requests."""
        deadline, patience = time.monotonic() + self.timeout, _FIRST_PATIENCE_S
        while True:
            left = deadline - time.monotonic()
            try:
                limit = 0.0 if self._stopped() else max(0.0, min(patience, left))
                return libtorchbeast.describe(address, limit, self.credentials)
            except TimeoutError as error:
                if self._security is not None and self._tls is not None and not self._stopped():
                    explain(address, self._security, self._tls)  # takes seconds
                if self._stopped() or left <= patience or time.monotonic() >= deadline:
                    raise _no_answer(address, self.timeout, error) from None
            except PermissionError as error:
                raise RunError(str(error)) from None
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise _no_answer(address, self.timeout, error) from None
            patience *= 2


def _no_answer(address: str, timeout: float, error: Exception) -> NoAnswerError:
    why = f"waited {timeout:g} s" if isinstance(error, TimeoutError) else str(error)
    return NoAnswerError(f"no environment server answers at {address} ({why})")


def _num_envs(description: dict[str, Any]) -> int:
    return int(description["num_envs"]) * int(description["num_streams"])


def check_same(address: str, ours: Description, other: str, theirs: Description) -> None:
    """Raises RunError when the servers at two addresses, or of two hosts, serve different
    environments.
    """
    if address == other:  # a host that was started again, or at two places of a machine
        address, other = f"{address} (at the start)", f"{other} (now)"
    for key in _ALIKE:
        if ours.get(key) != theirs.get(key):
            raise RunError(
                f"the servers at {address} and {other} must serve the same, "
                f"but their {key} is {ours.get(key)!r} and {theirs.get(key)!r}"
            )


def _action_space(address: str, description: dict[str, Any]) -> ActionSpace | None:
    said = description["action_space"]
    with _making_sense(address):
        return None if said is None else action_space_from_json(said)


def _observation_space(address: str, description: dict[str, Any]) -> Any:
    """Returns the nest of ArraySpec, with ranges of values if the server describes them."""
    said = description.get("observation_space")
    with _making_sense(address):
        specs = _to_specs(description["observation"])
        return specs if said is None else observation_space_from_json(said, specs)


def _env(address: str, description: dict[str, Any]) -> EnvSpec:
    """Returns the served environment.

    Servers of earlier versions send no keyword arguments, those of the original no options. The
    info keywords are those that come with steps, whatever the options say.
    """
    said = description.get("options") or {}
    with _making_sense(address):
        if not isinstance(said, dict):
            raise ValueError(f"its options must be a JSON object, got {said!r}")
        kwargs = said.get("env_kwargs", {})
        options = {**said, "info_keywords": description.get("info_keywords", ())}
        return EnvSpec.from_json(
            {"name": description["env_id"], "kwargs": kwargs, "options": options}
        )


@contextmanager
def _making_sense(address: str) -> Iterator[None]:
    """Raises RunError in place of an error about an invalid description."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the description from {address} is not valid: {error}") from None


def _to_specs(nest: Any) -> Any:
    """Converts leaves (dtype, shape) to ArraySpec."""
    if isinstance(nest, dict):
        return {key: _to_specs(nest[key]) for key in sorted(nest)}
    if len(nest) == 2 and isinstance(nest[0], str):
        return ArraySpec(tuple(nest[1]), nest[0])
    return tuple(_to_specs(item) for item in nest)
