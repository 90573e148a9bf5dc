# SPDX-License-Identifier: Apache-2.0
"""What is said of a pool with too few connected streams."""

from __future__ import annotations

from torchbeast.collect.contract import (
    LostStream,
    TooFewStreams,
    describe_lost_streams,
    shortage_of,
)


def test_lost_streams_say_when_they_end_the_run_and_how_many_prevent_it() -> None:
    short = TooFewStreams(connected=1, needed=2, seconds=42.7)
    lost_streams = [
        LostStream("a:50", 17.3, short),
        LostStream("a:50", 2.0, short),
        LostStream("b:50", 2.0, short),
    ]
    assert describe_lost_streams(lost_streams, live=1) == (
        "Lost 3 of 4 streams (the first one 17 s ago): a:50, b:50; reconnecting. Giving up in 43 s "
        "unless at least 2 streams are connected (--min_streams). Connected now: 1"
    )


def test_of_several_reasons_that_of_the_stream_lost_first_is_said() -> None:
    lost_streams = [
        LostStream("a:50", 2.0, None, "reset"),
        LostStream("b:50", 17.3, None, "this is not its token"),
    ]
    assert describe_lost_streams(lost_streams, live=1) == (
        "Lost 2 of 3 streams (the first one 17 s ago): a:50, b:50 (this is not its token); "
        "reconnecting"
    )


def test_of_several_learners_the_one_that_ends_first_is_described() -> None:
    later, first = TooFewStreams(2, 3, 50.0, " of rank 0"), TooFewStreams(0, 1, 9.0, " of rank 1")
    lost_streams = [
        LostStream("a:50", 10.0, later),
        LostStream("b:50", 51.0, first),
        LostStream("c:50", 1.0),
    ]
    assert shortage_of(lost_streams) == first
    assert describe_lost_streams(lost_streams, 2).endswith(
        "unless at least 1 stream of rank 1 is connected (--min_streams). Connected now: 0"
    )
