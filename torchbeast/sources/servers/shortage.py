# SPDX-License-Identifier: Apache-2.0
"""When a pool that has too few connected streams will end the run.

ActorPool ends it; this says it beforehand, from the figures that the pool gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchbeast.sources.contract import Shortage
from torchbeast.sources.servers.joined_hosts import Streams

TOO_FEW_S = 60.0
"""Seconds with too few connected streams after which the run ends."""


class CountedStreams:
    """The streams of a pool, retired ones included, with their number."""

    def __init__(self, pool: Streams, count: int) -> None:
        """count: of the streams that the pool has already."""
        self._pool, self.count = pool, count

    def add(self, env_server_addresses: Sequence[str]) -> None:
        """Adds a stream for each address."""
        self._pool.add(env_server_addresses)
        self.count += len(env_server_addresses)

    def remove(self, env_server_address: str) -> int:
        """Removes the streams of the server at the address; returns their number."""
        removed = self._pool.remove(env_server_address)
        self.count -= removed
        return removed

    def away_streams(self) -> list[tuple[str, float]]:
        """Returns (address, seconds since the loss) for each stream that is lost now."""
        return self._pool.away_streams()


def shortage(
    away: Sequence[float], num_streams: int, retired: int, min_streams: int
) -> Shortage | None:
    """Returns the shortage of a pool; None if enough streams are connected.

    away: seconds since the loss of each stream that is away. num_streams: of the pool, retired ones
    included. min_streams: as of the pool, 0 for half of them.
    """
    needed = min_streams or max(1, (num_streams + 1) // 2)
    unretired = num_streams - retired
    connected = unretired - len(away)
    if connected >= needed or not away:
        return None
    # With the losses in their order, this one left fewer than needed.
    decisive = min(max(0, unretired - needed), len(away) - 1)
    since = sorted(away, reverse=True)[decisive]
    return Shortage(connected, needed, max(0.0, TOO_FEW_S - since))
