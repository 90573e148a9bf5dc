# SPDX-License-Identifier: Apache-2.0
"""The contract of sources: what a learner asks of every one, and what it offers them.

tests/compliance/source.py checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import nn

    from torchbeast.processes.supervisor import Supervisor

ACTOR_STAGES = ("environment", "inference", "queueing")
"""Where actors spend their time: stepping, choosing actions, waiting for room for a rollout."""

STALL_S = 60.0
"""Seconds in one stage after which somebody is named."""

_NAMED = 3  # addresses in a sentence, at most


class Away(NamedTuple):
    """A stream that was lost and is not connected again."""

    where: str  # its server's address
    seconds: float  # since it was lost


class Source(Protocol):
    """Where batches come from."""

    @property
    def yields(self) -> type:
        """The class of its batches."""

    def start(self, supervisor: Supervisor) -> None:
        """Begins to collect, in threads of the supervisor."""

    def batches(self) -> Iterator[Any]:
        """Batches of one kind, until the source is closed; one iterator for each learner thread."""

    def status(self) -> dict[str, int]:
        """How full its queues are."""

    def seconds(self) -> dict[str, float]:
        """Seconds of all its actors together since the start, by ACTOR_STAGES."""

    def hanging(self) -> str:
        """Names workers that have been in one stage for over a minute; "" if there are none."""

    def away(self) -> list[Away]:
        """Streams that were lost and are not connected again."""


class Weights(Protocol):
    """The published weights, for threads that act."""

    def refresh(self, replica: nn.Module, version: int | None) -> int:
        """Loads the newest weights if `replica` holds others; the version it then holds."""


def describe_away(away: Sequence[Away], live: int) -> str:
    """Names the streams that are lost while `live` others play; "" if there are none."""
    if not away:
        return ""
    count = f"{len(away)} of {len(away) + live} streams"
    they_go = "it goes" if len(away) == 1 else "they go"
    return f"{count} {since(away)}: {_where(away)}; {they_go} on when a server answers there"


def since(away: Sequence[Away]) -> str:
    """lost 12 s ago; of several, the first loss."""
    first = max(stream.seconds for stream in away)
    return f"lost{', the first' * (len(away) > 1)} {first:.0f} s ago"


def _where(away: Sequence[Away]) -> str:
    """Each address once, and not all of many."""
    addresses = list(dict.fromkeys(stream.where for stream in away))
    more = len(addresses) - _NAMED
    return ", ".join(addresses[:_NAMED]) + (f" and {more} more" if more > 0 else "")
