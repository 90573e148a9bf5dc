# SPDX-License-Identifier: Apache-2.0
"""The streams of several learners, dealt anew as hosts come and go.

    rank 0   hosts that come and go --> Dealer -- orders --+--> RankStreams --> pool
    others                                                 +--> RankStreams --> pool

Only rank 0 looks at lists and doors, and decides. All ranks hear its orders in the same roll call,
and each carries out its own. None waits for another: a new stream connects while the others play.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torchbeast.core.wording import counted
from torchbeast.errors import RunError
from torchbeast.reporting.waiting import say
from torchbeast.sources.servers.config import PipelineConfig
from torchbeast.sources.servers.discovery import Fleet
from torchbeast.sources.servers.joined_hosts import Hosts, RolloutShape, Streams

_log = logging.getLogger("torchbeast.hosts")


class Order(NamedTuple):
    """What a rank is to do with its pool; JSON as a list."""

    rank: int
    what: Literal["add", "remove"]
    addresses: Sequence[str]  # of servers, one for each stream that is added


class Dealer:
    """The streams of all ranks as one pool, see `Streams`. Any thread may use it.

    A stream that comes goes to a rank with the fewest. Where streams that leave make the ranks
    uneven, or leave one with fewer than it needs, others move; the unfinished rollout of a stream
    that moves is dropped.
    """

    def __init__(self, shares: Sequence[Sequence[str]], needed: Sequence[int]) -> None:
        """Takes over the streams of the start; both arguments are in the order of ranks.

        shares: the server of each stream of a rank. needed: without which it ends the run; those of
        two ranks differ by one at most.
        """
        self._lock = threading.Lock()
        self._held = [Counter(share) for share in shares]
        self._needed = list(needed)
        self._orders: deque[Order] = deque()
        self._away: list[tuple[str, float, str]] = []
        self._idle: list[int] = []  # ranks without a stream

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._held)

    def add(self, env_server_addresses: Sequence[str]) -> None:
        """Deals a stream for each address."""
        with self._lock:
            for address in env_server_addresses:
                self._give(self._poorest(), address, 1)

    def remove(self, env_server_address: str) -> int:
        """Removes the streams of the server at the address; returns their number."""
        with self._lock:
            return sum(self._remove(rank, env_server_address) for rank in self._ranks())

    def away_streams(self) -> list[tuple[str, float, str]]:
        """Returns the lost streams of all ranks, as of the last roll call."""
        with self._lock:
            return self._away

    def note_away(self, away: list[tuple[str, float, str]]) -> None:
        """Notes the lost streams of all ranks."""
        with self._lock:
            self._away = away

    def orders(self) -> list[Order]:
        """Returns the orders since the last call. Streams move now, and not when others leave:
        a host that is replaced leaves and comes back at once.
        """
        with self._lock:
            if not self._orders:  # in nearly every roll call
                return []
            while self._move_some():
                pass
            self._warn_of_idle_ranks()
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def _move_some(self) -> bool:
        """Moves streams of one server from a rank with the most to one with the fewest; returns
        whether there was too much between them, or one that the other needs.
        """
        richest, poorest = max(self._ranks(), key=self._wealth), self._poorest()
        most = (self._count(richest) - self._count(poorest)) // 2
        if self._surplus(richest) > 0 > self._surplus(poorest):
            most = max(1, most)
        if most < 1:
            return False
        address, streams = self._fitting(richest, most)
        moved = min(most, streams)
        say(f"{counted(moved, 'stream')} of rank {richest} moved to rank {poorest}")
        self._remove(richest, address)  # a pool removes all streams of a server
        self._give(richest, address, streams - moved)
        self._give(poorest, address, moved)
        return True

    def _warn_of_idle_ranks(self) -> None:
        before, self._idle = self._idle, [rank for rank in self._ranks() if not self._held[rank]]
        if self._idle and self._idle != before:
            _log.warning(
                "fewer streams are left than ranks: the run ends within a minute unless a host is "
                "added"
            )

    def _fitting(self, rank: int, most: int) -> tuple[str, int]:
        """Returns the server of a rank with the most streams up to `most`, else with the fewest,
        and their number.
        """
        streams_of = self._held[rank].items()
        return max(streams_of, key=lambda item: (item[1] <= most, -abs(item[1] - most)))

    def _give(self, rank: int, address: str, streams: int) -> None:
        if streams:
            self._held[rank][address] += streams
            self._orders.append(Order(rank, "add", [address] * streams))

    def _remove(self, rank: int, address: str) -> int:
        removed = self._held[rank].pop(address, 0)
        if removed:
            self._orders.append(Order(rank, "remove", [address]))
        return removed

    def _ranks(self) -> range:
        return range(len(self._held))

    def _count(self, rank: int) -> int:
        return self._held[rank].total()

    def _surplus(self, rank: int) -> int:
        return self._count(rank) - self._needed[rank]

    def _wealth(self, rank: int) -> tuple[int, int]:
        return self._count(rank), self._surplus(rank)

    def _poorest(self) -> int:
        return min(self._ranks(), key=self._wealth)


class RankStreams:
    """The streams of this rank, which change as rank 0 orders.

    The thread that takes part in roll calls uses it; see `roll_call.Aside`.
    """

    def __init__(self, rank: int, dealer: Dealer | None) -> None:
        """dealer: of rank 0; None in the others."""
        self._rank, self._dealer = rank, dealer
        self.pool: Streams | None = None
        """Set before the first roll call."""

    def say(self) -> list[Order]:
        """Returns the orders of rank 0; none in other ranks."""
        return [] if self._dealer is None else self._dealer.orders()

    def hear(self, said: Any, away: list[tuple[str, float, str]]) -> None:
        """Carries out this rank's orders.

        said: by rank 0. away: (address, seconds since the loss, why) of the lost streams of all
            ranks.

        Raises RunError for what is no order.
        """
        for order in _orders_in(said):
            if order.rank == self._rank:
                self._carry_out(order)
        if self._dealer is not None:
            self._dealer.note_away(away)

    def _carry_out(self, order: Order) -> None:
        assert self.pool is not None
        if order.what == "add":
            self.pool.add(order.addresses)
        else:
            for address in order.addresses:
                self.pool.remove(address)


def _orders_in(said: Any) -> list[Order]:
    """Reads what rank 0 said; raises RunError if anything of it is no order."""
    return [_order(each) for each in (said if isinstance(said, list | tuple) else [said])]


def _order(said: Any) -> Order:
    match said:
        case [int(rank), ("add" | "remove") as what, [*addresses]]:
            if all(isinstance(address, str) for address in addresses):
                return Order(rank, what, addresses)
    raise RunError(
        f"rank 0 says {said!r:.200}, which is no order for streams: start all learners with the "
        "same version of TorchBeast"
    )


class DealtHosts:
    """Hosts that may change while several learners run; those of rank 0. See `Hosts`."""

    def __init__(self, hosts: Hosts, dealer: Dealer) -> None:
        self._hosts, self._dealer = hosts, dealer

    def follow(self, streams: Streams, shape: RolloutShape, closed: threading.Event) -> None:
        """Changes the streams of all ranks as the hosts change, until closed.

        streams: of rank 0. shape: of every rank, because a stream may move to any.
        """
        self._hosts.follow(self._dealer, shape._replace(ranks=self._dealer.size), closed)


def shared_out(
    fleet: Fleet, hosts: Hosts | None, rank: int, size: int, pipeline: PipelineConfig
) -> tuple[RankStreams, Hosts | None]:
    """Returns this rank's streams, and its hosts that may change: those of all ranks in rank 0.

    pipeline: of all ranks together. Raises UsageError as `Fleet.share`.
    """
    if rank > 0:
        return RankStreams(rank, None), None
    shares = [fleet.share(each, size).stream_addresses for each in range(size)]
    count = len(fleet.stream_addresses)
    needed = [pipeline.share(size, len(share), count).min_streams or 0 for share in shares]
    dealer = Dealer(shares, needed)
    return RankStreams(rank, dealer), hosts and DealtHosts(hosts, dealer)
