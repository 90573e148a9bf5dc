# SPDX-License-Identifier: Apache-2.0
"""The interface between a learner and its source, and what learners need to wait for batches and to
describe lost streams.

tests/compliance/source.py checks it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from torchbeast.core.base.checks import counted
from torchbeast.fleets.waiting import STALL_S as STALL_S
from torchbeast.fleets.waiting import WAIT_S as WAIT_S

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchbeast.collect.config import RolloutConfig
    from torchbeast.core.actors.contract import Mode
    from torchbeast.core.actors.registry import Agent
    from torchbeast.core.base.specs import Precision
    from torchbeast.fleets.supervisor import Supervisor

ACTOR_STAGES = ("environment", "inference", "queueing")
"""Stages of collecting: stepping, choosing actions, waiting for room for a rollout."""

_NAMED = 3  # addresses that a message names, at most


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


class Source(Protocol):
    """Yields the batches that a learner trains on."""

    @property
    def yields(self) -> type:
        """The class of its batches."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of the source and its batches on the learner's machine, once all of it
        is in use.
        """

    def start(self, supervisor: Supervisor) -> None:
        """Starts collecting, in threads that the supervisor runs."""

    def batches(self) -> Iterator[Any]:
        """Yields batches until the source is closed; each learner thread has its own iterator."""

    def close(self) -> None:
        """Wakes every thread that waits here; may be called again."""

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives every environment options for its next resets, and later workers' environments too.

        Raises UsageError if this source cannot pass them on. If an environment refuses them, the
        run fails.
        """

    def status(self) -> Mapping[str, float]:
        """Returns queue lengths and counts, by the names of log columns."""

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all workers have spent since the start, by ACTOR_STAGES."""

    def hanging(self) -> str:
        """Describes workers that have been in one stage for over WAIT_S, or returns ""."""

    def lost_streams(self) -> list[LostStream]:
        """Returns the streams that were lost and have not reconnected."""


class Publisher(Protocol):
    """Receives the learner's weights after each update."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as this version."""


Published = TypeVar("Published", bound=Publisher)


@dataclass(frozen=True, kw_only=True)
class LearnerInfo(Generic[Published]):
    """The facts about a learner that its source needs to know."""

    agent: Agent
    weights: Published
    device: torch.device  # batches for a GPU are in pinned memory
    extras: tuple[str, ...]  # names of the outputs of acting that the algorithm needs
    mode: Mode  # in which actions are chosen
    precision: Precision  # of the actor's features on the CPU
    rollouts: RolloutConfig  # the batches of the source
    seed: int  # of the environments; differs after each resumption
    spare_columns: int  # of a batch, after the new rollouts: for replayed ones
    batches_at_once: int  # that the learner holds, at most: taken and not yet returned
    first_step: int = 0  # env steps that earlier parts of the run have learnt from
    # Whether the given share of a batch suffices; only LocalSource asks, in a gradient worker.
    stops_early: Callable[[float], bool] | None = None


class Weights(Protocol):
    """The published weights, as the threads and processes that act read them."""

    @property
    def version(self) -> int:
        """The newest version."""

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the wanted or newest version, unless `replica` holds it; returns its number."""


class BatchTaker:
    """Takes batches from a source in a separate thread, one for each `ask`, so that the caller can
    wait with a timeout.

    Batches are numbered from 1. It keeps the newest batch until you ask for the next one. If `ask`
    or `wait` is interrupted, you can call it again: batches are neither lost nor taken twice.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        """batches: the method `batches` of a source."""
        self._batches = batches
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._kept: tuple[int, Any] = 0, None  # the number of the newest batch, and the batch
        # Each entry only says that `_kept` has changed, so an interrupt may lose one.
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def ask(self, number: int) -> None:
        """Asks for this batch, which returns the batch before it. May be called again."""
        self._asked.put(number)

    def wait(self, number: int, seconds: float) -> Any:
        """Returns the batch with this number; None on a timeout or after the end."""
        until = time.monotonic() + seconds
        while self._kept[0] != number and not self._closed.is_set():
            if (left := until - time.monotonic()) <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                self._changes.get(timeout=left)
        kept, batch = self._kept
        return batch if kept == number else None

    def run(self) -> None:
        """Takes batches until the source or `close` ends it."""
        batches = self._batches()
        while (number := self._asked.get()) and not self._closed.is_set():
            if number == self._kept[0]:
                continue  # after an interrupt, `ask` was called again
            batch = next(batches, None)
            if batch is None:
                return
            self._kept = number, batch
            if self._changes.empty():  # else the entry that wakes `wait` is still there
                self._changes.put(None)

    def close(self) -> None:
        """Ends both waits here. May be called again."""
        self._closed.set()
        self._asked.put(0)
        self._changes.put(None)


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
    why = max(streams, key=lambda stream: stream.seconds).why  # of the stream that was lost first
    return (
        f"Lost {count} streams{ago}: {_where(streams)}{f' ({why})' if why else ''}; reconnecting"
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


def _where(streams: Sequence[LostStream]) -> str:
    """Returns the addresses, each once; if there are many, the first ones and a count."""
    addresses = list(dict.fromkeys(stream.where for stream in streams))
    more = len(addresses) - _NAMED
    return ", ".join(addresses[:_NAMED]) + (f" and {more} more" if more > 0 else "")
