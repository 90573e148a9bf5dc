# SPDX-License-Identifier: Apache-2.0
"""Keeps the streams of a running pool in step with the hosts that dial in.

A host that comes is described, compared with those of the start, and added. One that has been away
for half a minute is removed, before its lost streams could end the run; if it comes back later it
is added again. Servers that a host lacks when it is back are removed at once. Nothing here ends
the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torchbeast.errors import RunError
from torchbeast.sources.servers.discovery import Asking, Description, Fleet, check_same
from torchbeast.sources.servers.host_list import Streams
from torchbeast.sources.tunnel.door import Visit

_log = logging.getLogger("torchbeast.door")

_INTERVAL_S = 0.5  # between two looks at the hosts
_ANSWER_S = 2.0  # for each server of a host that is added
_AGAIN_S = 15.0  # until a host that could not be added is asked again
_AWAY_S = 30.0  # until a host is removed; the pool bears too few streams for a minute


class Visitors:
    """The hosts at a door, now and later. Used by one thread."""

    def __init__(self, visits: Callable[[], list[Visit]], fleet: Fleet) -> None:
        """Takes over the servers that were found at the start.

        visits: returns the latest visit of every host.
        """
        self._visits = visits
        self._asking = Asking(_ANSWER_S)
        self._first = next(iter(fleet.descriptions.items()))  # whom all must equal
        self._servers = set(fleet.descriptions)  # addresses whose streams are in the pool
        self._again: dict[str, float] = {}  # when to ask a host again that is not used
        self._away: dict[str, float] = {}  # since when

    def follow(self, streams: Streams, columns: int, closed: threading.Event) -> None:
        """Changes the streams as hosts come and go, until closed.

        columns: of a rollout; each stream must have a multiple of so many environments.
        """
        while not closed.wait(_INTERVAL_S):
            self.look(streams, columns, time.monotonic())

    def look(self, streams: Streams, columns: int, now: float) -> None:
        """Adds and removes hosts once."""
        visits = self._visits()
        self._remove_dropped(visits, streams)
        for visit in visits:
            if visit.is_here:
                self._away.pop(visit.label, None)
                self._add(visit, streams, columns, now)
            elif now - self._away.setdefault(visit.label, now) >= _AWAY_S:
                self._remove(visit, streams)

    def _add(self, visit: Visit, streams: Streams, columns: int, now: float) -> None:
        new = [address for address in visit.addresses if address not in self._servers]
        if not new or self._again.get(visit.label, now) > now:
            return
        try:
            described = {address: self._described(address, columns) for address in new}
        except RunError as error:
            if visit.label not in self._again:
                _log.warning("the host %s is not used: %s; it is tried again", visit.label, error)
            self._again[visit.label] = now + _AGAIN_S
            return
        self._again.pop(visit.label, None)
        self._servers.update(described)
        added = [a for a, said in described.items() for _ in range(said["num_streams"])]
        streams.add(added)
        _tell(f"added host {visit.label} (streams: {len(added)})")

    def _described(self, address: str, columns: int) -> Description:
        """Asks a server; raises RunError if it cannot take part."""
        said = self._asking.ask(address)
        check_same(*self._first, address, said)
        if said["num_envs"] % columns:
            raise RunError(
                f"a stream of {address} has {said['num_envs']} environments, and rollouts of this "
                f"run join {columns}: start it with a multiple of {columns} per stream"
            )
        return said

    def _remove(self, visit: Visit, streams: Streams) -> None:
        gone = [address for address in visit.addresses if address in self._servers]
        if gone:
            count = sum(streams.remove(address) for address in gone)
            self._servers.difference_update(gone)
            _tell(f"removed host {visit.label} (streams: {count})")

    def _remove_dropped(self, visits: list[Visit], streams: Streams) -> None:
        """Removes servers that no host has any more: one of them came back with fewer."""
        dropped = self._servers.difference(*(visit.addresses for visit in visits))
        if dropped:
            count = sum(streams.remove(address) for address in sorted(dropped))
            self._servers -= dropped
            _tell(f"removed servers that their host no longer has (streams: {count})")


def _tell(sentence: str) -> None:
    _log.info(sentence)
    print(sentence, flush=True)
