# SPDX-License-Identifier: Apache-2.0
"""Asks listed hosts of which a stream was away: they may have been restarted with other servers or
streams, or let the learner in no more.

The pool connects again to whatever it had there, and knows nothing of servers that are new. So such
a host is described again, until all of it is back and was described.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.asking_together import asked_together
from torchbeast.sources.servers.discovery import Host, NoAnswerError
from torchbeast.sources.servers.joined_hosts import JoinedHosts

_EVERY_S = 15.0  # from one description of a host to the next


class Restarts:
    """Compares hosts with their descriptions of before. Used by one thread."""

    def __init__(self, hosts: JoinedHosts, describe: Callable[[str], Host]) -> None:
        """hosts: of the pool. describe: asks the servers of a host, in several threads at once;
        raises NoAnswerError if it is away, RunError or UsageError if it refuses.
        """
        self._hosts = hosts
        self._describe = describe
        self._next: dict[str, float] = {}  # when to describe a host of which a stream was away
        self._away: set[str] = set()  # hosts of which one is away now

    def note(self, away: Collection[str], now: float) -> None:
        """Notes the hosts of which a stream is away. away: addresses of servers."""
        hosts = self._hosts.joined.values()
        self._away = {h.name for h in hosts if any(address in away for address in h.servers)}
        for name in self._away:
            self._next.setdefault(name, now)

    def changed(self, hosts: Iterable[Host], now: float) -> list[Host]:
        """Returns those of some hosts that have other streams than before, as they are now; warns
        of one that refuses.
        """
        due = {host.name: host for host in hosts if self._next.get(host.name, math.inf) <= now}
        answers = asked_together(self._describe, due)
        found = [(due[name], self._found(name, answer, now)) for name, answer in answers.items()]
        return [new for host, new in found if new is not None and _streams(new) != _streams(host)]

    def _found(self, name: str, answer: Callable[[], Host], now: float) -> Host | None:
        """Returns a host that was asked, if it has answered."""
        self._next[name] = now + _EVERY_S
        try:
            found = answer()
        except NoAnswerError:  # the display names its streams
            return None
        except (RunError, UsageError) as error:
            self._hosts.warn(name, f"the streams of {name} stay away: {error}")
            return None
        self._hosts.forget(name)
        if name not in self._away:
            del self._next[name]
        return found


def _streams(host: Host) -> dict[str, tuple[int, int]]:
    """Returns the number of streams of each server, and of environments of each stream."""
    return {a: (said["num_streams"], said["num_envs"]) for a, said in host.servers.items()}
