# SPDX-License-Identifier: Apache-2.0
"""Streams that a source has lost, and how messages describe them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchbeast.core.base.checks import counted, first_of


class TooFewStreams(NamedTuple):
    """Fewer streams than --min_streams are connected."""

    connected: int
    needed: int
    seconds: float  # until the run ends, unless enough streams connect before
    of: str = ""  # whose streams these are: " of rank 1"


class LostStream(NamedTuple):
    """A stream that was lost and has not reconnected."""

    where: str  # its server's address
    seconds: float  # since it was lost
    shortage: TooFewStreams | None = None  # of streams of its source, if there are too few
    why: str = ""  # the error that ended its last connection, in one line; "": no answer


def describe_lost_streams(streams: Sequence[LostStream], live: int) -> str:
    """Describes the lost streams, while `live` others play, or returns ""."""
    if not streams:
        return ""
    count = (
        f"all {len(streams)}"
        if not live and len(streams) > 1
        else f"{len(streams)} of {len(streams) + live}"
    )
    ago = since(streams).removeprefix("lost")
    where = first_of(list(dict.fromkeys(stream.where for stream in streams)))
    why = max(streams, key=lambda stream: stream.seconds).why  # of the stream that was lost first
    return (
        f"Lost {count} streams{ago}: {where}{f' ({why})' if why else ''}; reconnecting"
        f"{_end(streams)}"
    )


def shortage_of(streams: Sequence[LostStream]) -> TooFewStreams | None:
    """Returns the shortage that will end the run first, or None."""
    found = [stream.shortage for stream in streams if stream.shortage is not None]
    return min(found, key=lambda shortage: shortage.seconds, default=None)


def _end(streams: Sequence[LostStream]) -> str:
    """Says when the lost streams will end the run; "" if they will not."""
    short = shortage_of(streams)
    if short is None:
        return ""
    return (
        f". Giving up in {short.seconds:.0f} s unless at least "
        f"{counted(short.needed, 'stream')}{short.of} {'is' if short.needed == 1 else 'are'} "
        f"connected (--min_streams), now {short.connected}"
    )


def since(streams: Sequence[LostStream]) -> str:
    """Returns "lost 12 s ago"; for several streams, the time of the first loss."""
    first = max(stream.seconds for stream in streams)
    return f"lost{', the first' * (len(streams) > 1)} {first:.0f} s ago"
