# SPDX-License-Identifier: Apache-2.0
"""What is said of a pool with too few connected streams."""

from __future__ import annotations

from torchbeast.collect.contract import Away, Shortage, describe_away, shortage_of


def test_lost_streams_say_when_they_end_the_run_and_how_many_prevent_it() -> None:
    short = Shortage(connected=1, needed=2, seconds=42.7)
    away = [Away("a:50", 17.3, short), Away("a:50", 2.0, short), Away("b:50", 2.0, short)]
    assert describe_away(away, live=1) == (
        "Lost 3 of 4 streams, the first 17 s ago: a:50, b:50; reconnecting. Giving up in 43 s "
        "unless at least 2 streams are connected (--min_streams), now 1"
    )


def test_of_several_reasons_that_of_the_stream_lost_first_is_said() -> None:
    away = [Away("a:50", 2.0, None, "reset"), Away("b:50", 17.3, None, "this is not its token")]
    assert describe_away(away, live=1) == (
        "Lost 2 of 3 streams, the first 17 s ago: a:50, b:50 (this is not its token); reconnecting"
    )


def test_of_several_learners_the_one_that_ends_first_is_described() -> None:
    later, first = Shortage(2, 3, 50.0, " of rank 0"), Shortage(0, 1, 9.0, " of rank 1")
    away = [Away("a:50", 10.0, later), Away("b:50", 51.0, first), Away("c:50", 1.0)]
    assert shortage_of(away) == first
    assert describe_away(away, 2).endswith(
        "Giving up in 9 s unless at least 1 stream of rank 1 is connected (--min_streams), now 0"
    )
