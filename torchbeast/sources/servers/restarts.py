# SPDX-License-Identifier: Apache-2.0
"""Notices listed hosts that were restarted with other servers or streams.

The pool connects again to whatever it had there, and knows nothing of servers that are new. So a
host of which a stream was away is described again, until all of it is back and was described.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.discovery import Host

_EVERY_S = 15.0  # from one description of a host to the next


class Restarts:
    """Compares hosts with their descriptions of before. Used by one thread."""

    def __init__(self, describe: Callable[[str], Host]) -> None:
        """describe: asks the servers of a host; raises RunError or UsageError if it is away."""
        self._describe = describe
        self._next: dict[str, float] = {}  # when to describe a host of which a stream was away

    def changed(self, hosts: Iterable[Host], away: Collection[str], now: float) -> list[str]:
        """Returns the names of hosts that have other streams than before.

        hosts: those whose streams are in the pool. away: addresses of servers whose streams are
        away.
        """
        return [host.name for host in hosts if self._is_changed(host, away, now)]

    def _is_changed(self, host: Host, away: Collection[str], now: float) -> bool:
        is_away = any(address in away for address in host.servers)
        if is_away:
            self._next.setdefault(host.name, now)
        if self._next.get(host.name, math.inf) > now:
            return False
        self._next[host.name] = now + _EVERY_S
        try:
            found = self._describe(host.name)
        except (RunError, UsageError):
            return False
        if not is_away:
            del self._next[host.name]
        return _streams(found) != _streams(host)


def _streams(host: Host) -> dict[str, tuple[int, int]]:
    """Returns the number of streams of each server, and of environments of each stream."""
    return {a: (said["num_streams"], said["num_envs"]) for a, said in host.servers.items()}
