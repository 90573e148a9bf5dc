# SPDX-License-Identifier: Apache-2.0
"""Follows a list of hosts that changes: a file, or the addresses of a name.

    file or name --- every 3 s ---> hosts --- new, gone, restarted ---> JoinedHosts
    pool --- every 0.5 s ---> streams that are away ---> Restarts

A change counts once it was seen twice in a row, because a file may be read while it is written. A
list that cannot be read is a warning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.asking_together import asked_together
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.discovery import Asking, Fleet, Host, check_named_once, host_at
from torchbeast.sources.servers.hosts import hosts
from torchbeast.sources.servers.joined_hosts import ANSWER_S, JoinedHosts, RolloutShape, Streams
from torchbeast.sources.servers.restarts import Restarts

_INTERVAL_S = 3.0  # between two looks at the list
_GLANCE_S = 0.5  # between two looks at the streams; no host is restarted in less


class HostList:
    """The hosts that --env_servers names, now and later. Used by one thread."""

    def __init__(self, named: str, fleet: Fleet, security: LearnerSecurityConfig) -> None:
        """Takes over the hosts that were found at the start.

        named: a file or names, see `hosts`; at the start it named those of the fleet.

        Raises UsageError when the files of the credentials cannot be read.
        """
        self._named = named
        self._closed = threading.Event()
        self._asking = Asking(ANSWER_S, lambda: self._closed.is_set(), security)
        self._hosts = JoinedHosts(fleet)
        self._restarts = Restarts(self._hosts, self._describe)
        self._seen = list(self._hosts.joined)

    def follow(self, streams: Streams, shape: RolloutShape, closed: threading.Event) -> None:
        """Changes the streams as the list changes, until closed; see `Hosts`."""
        self._closed, next_look = closed, time.monotonic() + _INTERVAL_S
        while not closed.wait(_GLANCE_S):
            now = time.monotonic()
            if now < next_look:
                self.glance(streams, now)
                continue
            self.look(streams, shape, now)
            next_look = time.monotonic() + _INTERVAL_S

    def glance(self, streams: Streams, now: float) -> None:
        """Notes whose streams are away, which may not be for long."""
        away = {address for address, *_ in streams.away_streams()}
        self._restarts.note(away, now)

    def look(self, streams: Streams, shape: RolloutShape, now: float) -> None:
        """Reads the list once, and adds and removes hosts."""
        self.glance(streams, now)
        listed = self._read()
        if listed is None:
            return
        joined = self._hosts.joined
        for host in self._restarts.changed([joined[n] for n in listed if n in joined], now):
            self._hosts.remove(host.name, streams)
            self._hosts.add(host.name, partial(self._found, host), streams, shape, now)
        due = [n for n in listed if n not in joined and self._hosts.may_be_asked(n, now)]
        for name, answer in asked_together(self._describe, due).items():
            self._hosts.add(name, partial(self._unless_named, name, answer), streams, shape, now)
        for name in [name for name in joined if name not in listed]:
            self._hosts.remove(name, streams)
        self._hosts.forget_others(listed)
        self._hosts.warn_if_none_is_left()

    def _read(self) -> list[str] | None:
        """Returns the hosts of the list; None if it cannot be read, or has only just changed."""
        try:
            listed = hosts(self._named, self._hosts.joined)
        except (RunError, UsageError) as error:
            sentence = f"{error}; the run goes on with the hosts that it has"
            self._hosts.warn(self._named, sentence)
            return None
        self._hosts.forget(self._named)
        before, self._seen = self._seen, listed
        return listed if set(listed) == set(before) else None  # name servers shuffle answers

    def _describe(self, name: str) -> Host:
        return host_at(name, self._asking)

    def _unless_named(self, name: str, describe: Callable[[], Host]) -> Host:
        """Describes a host; raises UsageError for the server of a host that is in the pool."""
        check_named_once(name, self._hosts.joined.values())
        return describe()

    def _found(self, host: Host) -> Host:
        return self._unless_named(host.name, lambda: host)
