# SPDX-License-Identifier: Apache-2.0
"""Keeps the streams of a running pool in step with a list of hosts that changes.

    file or name --- every 3 s ---> hosts --- new ones: described, compared ---> pool.add
                                          --- those that are gone -------------> pool.remove

A change counts once it was seen twice in a row, because a file may be read while it is written.
Nothing here ends the run: a list that cannot be read, a host that does not answer and one that
serves something else are warnings, and are tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.discovery import (
    Asking,
    Fleet,
    Host,
    check_named_once,
    check_same,
    host_at,
)
from torchbeast.sources.servers.hosts import hosts

_log = logging.getLogger("torchbeast.hosts")

_INTERVAL_S = 3.0  # between two looks at the list
_ANSWER_S = 2.0  # for each server of a host that is added
_AGAIN_S = 15.0  # until a host that could not be added is tried again


class Streams(Protocol):
    """The methods of ActorPool that change its streams."""

    def add(self, env_server_addresses: Sequence[str]) -> None:
        """Adds a stream for each address."""

    def remove(self, env_server_address: str) -> int:
        """Removes the streams of the server at the address; returns their number."""


class Hosts(Protocol):
    """Hosts that may change while a run goes on."""

    def follow(self, streams: Streams, columns: int, closed: threading.Event) -> None:
        """Changes the streams as the hosts change, until closed.

        columns: of a rollout; each stream must have a multiple of so many environments.
        """


class HostList:
    """The hosts that --env_servers names, now and later. Used by one thread."""

    def __init__(self, named: str, fleet: Fleet, security: LearnerSecurityConfig) -> None:
        """Takes over the hosts that were found at the start.

        named: a file or names, see `hosts`; at the start it named those of the fleet.

        Raises UsageError when the files of the credentials cannot be read.
        """
        self._named = named
        self._asking = Asking(_ANSWER_S, security=security)
        self._hosts = {host.name: host for host in fleet.hosts}
        self._first = next(iter(fleet.hosts[0].servers.items()))  # whom all must equal
        self._seen = list(self._hosts)
        self._told: dict[str, str] = {}  # the warning about a host, or about the list
        self._again: dict[str, float] = {}  # when to try a host again

    def follow(self, streams: Streams, columns: int, closed: threading.Event) -> None:
        """Changes the streams as the list changes, until closed.

        columns: of a rollout; each stream must have a multiple of so many environments.
        """
        while not closed.wait(_INTERVAL_S):
            self.look(streams, columns, time.monotonic())

    def look(self, streams: Streams, columns: int, now: float) -> None:
        """Reads the list once, and adds and removes hosts."""
        listed = self._read()
        if listed is None:
            return
        for name in listed:
            if name not in self._hosts and self._again.get(name, now) <= now:
                self._add(name, streams, columns, now)
        for name in [name for name in self._hosts if name not in listed]:
            self._remove(name, streams)
        for gone in [name for name in self._again if name not in listed]:
            del self._again[gone]
            self._told.pop(gone, None)

    def _read(self) -> list[str] | None:
        """Returns the hosts of the list; None if it cannot be read, or has only just changed."""
        try:
            listed = hosts(self._named)
        except UsageError as error:
            self._warn(self._named, f"{error}; the run goes on with the hosts that it has")
            return None
        self._told.pop(self._named, None)
        before, self._seen = self._seen, listed
        return listed if set(listed) == set(before) else None  # name servers shuffle answers

    def _add(self, name: str, streams: Streams, columns: int, now: float) -> None:
        try:
            host = self._described(name, columns)
        except (RunError, UsageError) as error:
            self._again[name] = now + _AGAIN_S
            self._warn(name, f"{name} is not used: {error}; it is tried again")
            return
        self._again.pop(name, None)
        self._told.pop(name, None)
        self._hosts[name] = host
        streams.add(host.stream_addresses)
        _tell(f"added host {name} ({_streams(len(host.stream_addresses))})")

    def _described(self, name: str, columns: int) -> Host:
        """Asks the servers of a host; raises RunError or UsageError if it cannot take part."""
        check_named_once(name, self._hosts.values())
        host = host_at(name, self._asking)
        for address, said in host.servers.items():
            check_same(*self._first, address, said)
            if said["num_envs"] % columns:
                raise RunError(
                    f"a stream of {address} has {said['num_envs']} environments, and rollouts of "
                    f"this run join {columns}: start it with a multiple of {columns} per stream"
                )
        return host

    def _remove(self, name: str, streams: Streams) -> None:
        host = self._hosts.pop(name)
        count = sum(streams.remove(address) for address in host.servers)
        _tell(f"removed host {name} ({_streams(count)})")

    def _warn(self, about: str, sentence: str) -> None:
        """Warns, but not again of the same."""
        if self._told.get(about) != sentence:
            self._told[about] = sentence
            _log.warning(sentence)


def _streams(count: int) -> str:
    return f"{count} stream{'s' * (count != 1)}"


def _tell(sentence: str) -> None:
    _log.info(sentence)
    print(sentence, flush=True)
