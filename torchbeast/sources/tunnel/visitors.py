# SPDX-License-Identifier: Apache-2.0
"""Follows the hosts that dial in.

One that has been away for half a minute is removed, before its lost streams could end the run; it
is added again whenever it comes back. One that comes back with other servers replaces itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torchbeast.sources.servers.asking_together import asked_together
from torchbeast.sources.servers.discovery import Asking, Fleet, Host
from torchbeast.sources.servers.joined_hosts import ANSWER_S, JoinedHosts, RolloutShape, Streams
from torchbeast.sources.tunnel.door import Visit

_INTERVAL_S = 0.5  # between two looks at the hosts
_AWAY_S = 30.0  # until a host is removed; the pool bears too few streams for a minute


class Visitors:
    """The hosts at a door, now and later. Used by one thread."""

    def __init__(
        self,
        visits: Callable[[], list[Visit]],
        fleet: Fleet,
        tell: Callable[[str, str], None] = lambda label, sentence: None,
    ) -> None:
        """Takes over the hosts that were found at the start.

        visits: returns the latest visit of every host. tell: tells a host, named by its label, a
        sentence.
        """
        self._visits, self._tell = visits, tell
        self._asking = Asking(ANSWER_S)
        self._hosts = JoinedHosts(fleet)
        self._asked: dict[str, Sequence[str]] = {}  # addresses that were asked last
        self._away: dict[str, float] = {}  # hosts of the pool, since when

    def follow(self, streams: Streams, shape: RolloutShape, closed: threading.Event) -> None:
        """Changes the streams as hosts come and go, until closed; see `Hosts`."""
        while not closed.wait(_INTERVAL_S):
            self.look(streams, shape, time.monotonic())

    def look(self, streams: Streams, shape: RolloutShape, now: float) -> None:
        """Adds and removes hosts once."""
        visits = {visit.label: visit for visit in self._visits()}
        for label in list(self._hosts.joined):
            if self._has_left(label, visits.get(label), now):
                self._away.pop(label, None)
                self._hosts.remove(label, streams)
        self._forget_others(visits)
        due = [label for label, visit in visits.items() if self._is_due(visit, now)]
        answers = asked_together(lambda label: described(visits[label], self._asking), due)
        for label, answer in answers.items():
            if refusal := self._hosts.add(label, answer, streams, shape, now):
                self._tell(label, f"the learner does not use this host: {refusal}")
        self._hosts.warn_if_none_is_left()

    def _is_due(self, visit: Visit, now: float) -> bool:
        """Returns whether to ask a host now, because it could be added."""
        if not visit.is_here or visit.label in self._hosts.joined:
            return False
        if self._asked.get(visit.label) != visit.addresses:  # other servers than those before
            self._asked[visit.label] = visit.addresses
            self._hosts.forget(visit.label)
        return self._hosts.may_be_asked(visit.label, now)

    def _has_left(self, label: str, visit: Visit | None, now: float) -> bool:
        """Returns whether the servers of a host that is in the pool will not come back.

        visit: None: the door has forgotten it.
        """
        if visit is not None and visit.is_here:
            self._away.pop(label, None)
            return list(self._hosts.joined[label].servers) != list(visit.addresses)
        return now - self._away.setdefault(label, now) >= _AWAY_S

    def _forget_others(self, visits: Mapping[str, Visit]) -> None:
        """Forgets the questions to hosts that the door has forgotten."""
        self._hosts.forget_others(visits.keys())
        for label in self._asked.keys() - visits.keys():
            del self._asked[label]


def described(visit: Visit, asking: Asking) -> Host:
    """Asks all servers of a host that dialled in; raises RunError when one does not answer."""
    servers = {address: asking.ask(address, visit.label) for address in visit.addresses}
    return Host(visit.label, servers)
