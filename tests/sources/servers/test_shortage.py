# SPDX-License-Identifier: Apache-2.0
"""A pool with too few connected streams says when the run ends, by the rules of ActorPool."""

from __future__ import annotations

import pytest

from torchbeast.sources.contract import Away, Shortage, describe_away, shortage_of
from torchbeast.sources.servers.shortage import CountedStreams, shortage


@pytest.mark.parametrize(
    ("away", "retired", "min_streams", "expected"),
    [
        ([], 0, 0, None),
        ([5.0, 9.0], 0, 0, None),  # 2 of 4, which is half
        ([5.0, 9.0, 17.0], 0, 0, (1, 2, 55.0)),  # too few since the third loss
        ([17.0, 9.0, 5.0, 1.0], 0, 0, (0, 2, 55.0)),
        ([9.0], 1, 0, None),
        ([9.0, 7.0], 1, 0, (1, 2, 53.0)),
        ([9.0, 7.0], 0, 1, None),
        ([9.0, 7.0], 0, 3, (2, 3, 53.0)),
        ([9.0, 7.0], 0, 4, (2, 4, 51.0)),
        ([80.0], 0, 4, (3, 4, 0.0)),
    ],
)
def test_the_run_ends_a_minute_after_the_loss_that_left_too_few_of_four(
    away: list[float], retired: int, min_streams: int, expected: tuple[int, int, float] | None
) -> None:
    assert shortage(away, 4, retired, min_streams) == (expected and Shortage(*expected))


def test_a_pool_that_has_lost_its_only_stream_needs_it() -> None:
    assert shortage([20.0], 1, 0, 0) == Shortage(0, 1, 40.0)


def test_lost_streams_say_when_they_end_the_run_and_how_many_prevent_it() -> None:
    short = Shortage(connected=1, needed=2, seconds=42.7)
    away = [Away("a:50", 17.3, short), Away("a:50", 2.0, short), Away("b:50", 2.0, short)]
    assert describe_away(away, live=1) == (
        "3 of 4 streams lost, the first 17 s ago: a:50, b:50; they go on when a server answers "
        "there. The run ends in 43 s unless 2 streams are connected (--min_streams); 1 is"
    )


def test_of_several_learners_the_one_that_ends_first_is_described() -> None:
    later, first = Shortage(2, 3, 50.0, " of rank 0"), Shortage(0, 1, 9.0, " of rank 1")
    away = [Away("a:50", 10.0, later), Away("b:50", 51.0, first), Away("c:50", 1.0)]
    assert shortage_of(away) == first
    assert describe_away(away, 2).endswith(
        "The run ends in 9 s unless 1 stream of rank 1 is connected (--min_streams); 0 are"
    )


class Pool:
    def add(self, env_server_addresses: object) -> None:
        pass

    def remove(self, env_server_address: str) -> int:
        return {"a:50": 2}.get(env_server_address, 0)

    def away_streams(self) -> list[tuple[str, float]]:
        return [("a:50", 3.0)]


def test_streams_are_counted_as_they_are_added_and_removed() -> None:
    streams = CountedStreams(Pool(), 2)
    streams.add(["b:50"] * 3)
    assert streams.count == 5
    assert [streams.remove(address) for address in ("a:50", "none:50")] == [2, 0]
    assert streams.count == 3
    assert streams.away_streams() == [("a:50", 3.0)]
