# SPDX-License-Identifier: Apache-2.0
"""Streams that are dealt to several learners anew while they run."""

from __future__ import annotations

import json
import operator
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from torchbeast.errors import RunError
from torchbeast.sources.servers.config import PipelineConfig
from torchbeast.sources.servers.dealt_streams import (
    Dealer,
    DealtHosts,
    Order,
    RankStreams,
    shared_out,
)
from torchbeast.sources.servers.discovery import Fleet, fleet_of
from torchbeast.sources.servers.joined_hosts import RolloutShape


class Pool:
    """The streams of a rank by server, as ActorPool has them: it removes all of a server."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.streams = Counter(addresses)
        self.kept = Counter(addresses)  # streams that have been there without a break

    def add(self, env_server_addresses: Sequence[str]) -> None:
        self.streams.update(env_server_addresses)

    def remove(self, env_server_address: str) -> int:
        self.kept.pop(env_server_address, None)
        return self.streams.pop(env_server_address, 0)

    def away_streams(self) -> list[tuple[str, float, str]]:
        raise AssertionError("asked by the roll call only")


class Ranks:
    """All ranks, and what they tell each other."""

    def __init__(self, *shares: Sequence[str], needed: Sequence[int] = ()) -> None:
        self.dealer = Dealer(shares, needed or [0] * len(shares))
        self.pools = [Pool(share) for share in shares]
        self.members = [
            RankStreams(rank, self.dealer if rank == 0 else None) for rank in range(len(shares))
        ]
        for member, pool in zip(self.members, self.pools, strict=True):
            member.pool = pool

    def call_the_roll(self, away: Sequence[tuple[str, float, str]] = ()) -> None:
        said = [json.loads(json.dumps(member.say())) for member in self.members]
        assert not any(said[1:]), "only rank 0 decides"
        for member in self.members:
            member.hear(said[0], list(away))

    @property
    def streams(self) -> list[dict[str, int]]:
        return [dict(pool.streams) for pool in self.pools]


def test_streams_that_come_go_to_the_ranks_with_the_fewest() -> None:
    ranks = Ranks(["a", "a"], ["a"], ["a", "a"])
    ranks.dealer.add(["b"] * 4)
    assert ranks.streams == [{"a": 2}, {"a": 1}, {"a": 2}], "nothing before the roll call"
    ranks.call_the_roll()
    assert ranks.streams == [{"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}]
    ranks.call_the_roll()
    assert [sum(each.values()) for each in ranks.streams] == [3, 3, 3], "an order is given once"


def test_streams_of_a_server_that_leaves_are_removed_in_every_rank() -> None:
    ranks = Ranks(["a", "b"], ["a", "c"])
    assert ranks.dealer.remove("a") == 2 and ranks.dealer.remove("a") == 0
    ranks.call_the_roll()
    assert ranks.streams == [{"b": 1}, {"c": 1}]


def test_a_rank_that_would_be_left_with_nothing_gets_streams_of_others() -> None:
    ranks = Ranks(["a", "a"], ["b", "c", "d", "d"])
    ranks.dealer.remove("a")
    ranks.call_the_roll()
    assert ranks.streams == [{"d": 2}, {"b": 1, "c": 1}]
    assert ranks.pools[1].kept == Counter(["b", "c"]), "those that stay play on"


def test_the_streams_of_one_server_are_divided_where_nothing_else_can_be() -> None:
    ranks = Ranks(["a", "a"], ["b"] * 5)
    ranks.dealer.remove("a")
    ranks.call_the_roll()
    assert ranks.streams == [{"b": 2}, {"b": 3}]


def test_streams_of_whole_servers_move_first() -> None:
    """The others of a server that is divided connect again too."""
    ranks = Ranks(["a", "a"], ["b", "b", "b", "c", "d"])
    ranks.dealer.remove("a")
    ranks.call_the_roll()
    assert ranks.streams == [{"c": 1, "d": 1}, {"b": 3}]
    assert ranks.pools[1].kept == Counter("bbb")


def test_a_host_that_is_replaced_in_one_look_moves_no_stream_of_others() -> None:
    ranks = Ranks(["a", "a"], ["b", "b"])
    assert ranks.dealer.remove("a") == 2
    ranks.dealer.add(["a"] * 2)
    ranks.call_the_roll()
    assert ranks.streams == [{"a": 2}, {"b": 2}]
    assert [pool.kept for pool in ranks.pools] == [Counter(), Counter("bb")]


def test_of_equal_ranks_the_one_that_needs_a_stream_gets_it() -> None:
    ranks = Ranks(["a"], ["a", "b"], needed=[1, 2])
    ranks.dealer.remove("b")
    ranks.dealer.add(["c"])
    ranks.call_the_roll()
    assert ranks.streams == [{"a": 1}, {"a": 1, "c": 1}]


def test_how_ranks_change_is_said_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(["a", "a"], ["b"] * 5)
    ranks.dealer.remove("a")
    ranks.call_the_roll()
    assert capsys.readouterr().out == "2 streams of rank 1 moved to rank 0\n"


def test_fewer_streams_than_ranks_are_warned_of_each_time_that_they_become_too_few(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Ranks(["a"], ["b"])
    for times in (1, 2):
        ranks.call_the_roll()
        ranks.dealer.remove("a")
        for _ in range(3):
            ranks.call_the_roll()
        assert ranks.streams == [{}, {"b": 1}], "one stream cannot be divided"
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == times and "ends within a minute" in said[-1]
        ranks.dealer.add(["a"])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_leaves_all_streams_are_dealt_once_and_evenly(seed: int) -> None:
    chance = random.Random(seed)
    size, least = chance.randint(1, 4), chance.randint(0, 3)
    needed = [least + chance.randint(0, 1) for _ in range(size)]
    ranks = Ranks(*[["start"] * chance.randint(1, 6) for _ in range(size)], needed=needed)
    there = Counter({"start": sum(pool.streams.total() for pool in ranks.pools)})
    for number in range(60):
        if there and chance.random() < 0.4:
            gone = chance.choice(sorted(there))
            assert ranks.dealer.remove(gone) == there.pop(gone)
        else:
            there[f"server {number}"] = chance.randint(1, 5)
            ranks.dealer.add([f"server {number}"] * there[f"server {number}"])
        if chance.random() < 0.7:
            ranks.call_the_roll()
            counts = [pool.streams.total() for pool in ranks.pools]
            assert sum((pool.streams for pool in ranks.pools), Counter()) == there
            assert max(counts) - min(counts) <= 1
            if sum(counts) >= sum(needed):
                assert all(map(operator.ge, counts, needed)), "none ends the run"


def test_rank_0_hears_which_streams_of_all_ranks_are_away() -> None:
    ranks = Ranks(["a"], ["b"])
    assert ranks.dealer.away_streams() == []
    ranks.call_the_roll([("a", 1.0, ""), ("b", 2.0, "reset")])
    assert ranks.dealer.away_streams() == [("a", 1.0, ""), ("b", 2.0, "reset")]
    ranks.call_the_roll()
    assert ranks.dealer.away_streams() == []


def test_hosts_change_the_streams_of_all_ranks_not_of_one() -> None:
    """They must fit the rollouts of every rank."""
    followed: list[Any] = []

    class Hosts:
        def follow(self, streams: Any, shape: RolloutShape, closed: threading.Event) -> None:
            followed.append((streams, shape, closed))

    dealer, closed = Dealer([["a"], ["b"]], [0, 0]), threading.Event()
    shape = RolloutShape(columns=4, env_bytes=1000)
    DealtHosts(Hosts(), dealer).follow(Pool([]), shape, closed)
    assert followed == [(dealer, shape._replace(ranks=dealer.size), closed)]


def served(streams_of: Sequence[tuple[str, int]]) -> Fleet:
    return fleet_of(
        {
            address: {
                "env_id": "Catch",
                "num_envs": 1,
                "num_streams": streams,
                "frame_stack": 1,
                "observation": ("float32", (10, 5)),
                "action_space": {"type": "Discrete", "n": 3, "start": 0},
            }
            for address, streams in streams_of
        }
    )


class Growing:
    """Hosts of which one comes, and then one leaves."""

    def follow(self, streams: Any, shape: RolloutShape, closed: threading.Event) -> None:
        streams.add(["c"])
        streams.remove("b")


def test_each_rank_keeps_as_many_streams_as_it_needs_while_there_are_enough() -> None:
    """Rank 0 begins with two streams of five, and rank 1 needs all of its three."""
    everything = PipelineConfig(min_streams=5)
    streams, hosts = shared_out(served([("a", 4), ("b", 1)]), Growing(), 0, 2, everything)
    assert hosts is not None
    hosts.follow(Pool([]), RolloutShape(1, 1000), threading.Event())
    streams.pool = pool = Pool(["a", "a"])
    orders = streams.say()
    streams.hear(json.loads(json.dumps(orders)), [])
    assert pool.streams.total() == 2, "of three, one went on to rank 1"
    other = RankStreams(1, None)
    other.pool = rest = Pool(["a", "a", "b"])
    other.hear(orders, [])
    assert rest.streams.total() == 3 and "b" not in rest.streams


def test_ranks_other_than_0_follow_no_hosts() -> None:
    streams, hosts = shared_out(served([("a", 2)]), Growing(), 1, 2, PipelineConfig())
    assert hosts is None and streams.say() == []


@pytest.mark.parametrize(
    "said",
    [
        5,
        [0, "add"],
        [0, "add", "abc"],
        [0, "add", [5]],
        [0, "move", ["a"]],
        ["0", "add", ["a"]],
        {"rank": 0, "what": "add", "addresses": ["a"]},
    ],
)
def test_what_is_no_order_ends_the_run_with_what_was_said(said: Any) -> None:
    ranks = Ranks(["a"], ["b"])
    with pytest.raises(RunError, match="no order for streams: .* the same version") as caught:
        ranks.members[1].hear([Order(1, "remove", ["b"]), said], [])
    assert repr(said) in str(caught.value)
    assert ranks.streams == [{"a": 1}, {"b": 1}]


def test_what_is_no_list_of_orders_ends_the_run_too() -> None:
    with pytest.raises(RunError, match="rank 0 says 'add', which is no order"):
        RankStreams(1, None).hear("add", [])
