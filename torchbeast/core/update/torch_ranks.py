# SPDX-License-Identifier: Apache-2.0
"""Learners in several processes, by torch.distributed: gloo on the CPU, nccl on GPUs.

    sum of vectors [n]    every rank gets one part of all vectors, adds it up in the order of
                          ranks, and gives the sum to all: the same bits in every rank, and in a
                          process that adds the same vectors itself

Ranks meet in a store that may still hold what ranks of earlier starts left there (`meet`):

    rank 1   asks  "rank 1: 5f3e.." ----> rank 0
    rank 0   names the start, under "5f3e.." ----> rank 1
    rank 1   has heard it, under "5f3e.." ----> rank 0, which waits for all
    rank 0   all have met, under "5f3e.." ----> rank 1

torchrun keeps its store when it starts the ranks again (--max_restarts), and counts its starts
differently on each machine, so the ranks name each start themselves. Each asks with a number that
nobody had before, and believes only what is under this number. Rank 0 answers every number that it
finds, including numbers of earlier starts, until each rank's newest one has heard this start's
name.

A rank that ends says why in the store that all have in common. The others notice immediately
that its connection is gone. They notice a silent rank after the timeout; a rank that needs longer
for something says so in the store too (`tell`).
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchbeast.core.update.ranks import added_in_order
from torchbeast.errors import RunError

TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the others, which may still collect."""

_log = logging.getLogger("torchbeast.ranks")
_BLOCK = 4096  # bytes of a message that need one exchange; a longer one needs a second
_LENGTH = 8  # bytes before a message
_ASKS = "meeting: rank "
_NAME = "meeting: name for "
_HEARD = "meeting: heard by "
_MET = "meeting: met by "
_REASON = "reason of rank "
_TOLD = "told: "
_LOOK_S = 0.1  # between two looks whether all are here


class RankGone(RunError):
    """Another rank has ended, or is out of reach."""


def served_store() -> Any:
    """Serves a store at a free port of this process, its attribute `port`."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def store_at(host: str, port: int) -> Any:
    """Returns the store that another process serves."""
    return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]


def store_of_torchrun(timeout_s: float) -> Any:
    """Returns the store that torchrun serves to the processes that it starts, once all are there.

    Leftovers of an earlier start of the ranks are out of sight (`meet`). Where
    something else set torchrun's environment variables, rank 0 serves it. Raises RankGone when they
    are not there within timeout_s seconds. Ctrl-C ends the wait.
    """
    deadline = time.monotonic() + timeout_s

    def pause() -> None:
        if time.monotonic() > deadline:
            raise RankGone(f"the {size} learners did not meet within {timeout_s:g} s")
        time.sleep(_LOOK_S)

    try:
        store, rank, size = next(
            dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
        )
        return dist.PrefixStore(meet(store, rank, size, pause), store)  # type: ignore[attr-defined]
    except RankGone:
        raise
    except RuntimeError as error:
        raise RankGone(
            f"the learners did not meet within {timeout_s:g} s ({str(error).splitlines()[0]})"
        ) from error


class TorchRanks:
    """The ranks of this process's default group. Used by one thread at a time; see `Ranks`."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        device: torch.device | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Waits until all ranks are there.

        store: a torch.distributed.Store that all ranks reach, and that lives as long as any of
            them, such as `store_at` the address of a `served_store`. device: of the gradients.
        timeout_s: that a rank may let the others wait in `gather`, `add` and `broadcast`.
        """
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._store = dist.PrefixStore("torchbeast", store)  # type: ignore[attr-defined]
        # Where vectors are added; all ranks may go on on the CPU.
        self.device = torch.device("cpu") if device is None else device
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        with self._others_needed():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages of all ranks, in their order."""
        own = json.dumps(message).encode()
        blocks = self._blocks(own, _BLOCK)
        ends = [_LENGTH + int.from_bytes(block[:_LENGTH], "little") for block in blocks]
        if max(ends) > _LENGTH + _BLOCK:
            blocks = self._blocks(own, max(ends) - _LENGTH)
        return [json.loads(block[_LENGTH:end]) for block, end in zip(blocks, ends, strict=True)]

    def add(self, vector: Tensor) -> Tensor:
        """Returns the sum of the ranks' vectors [n], added in their order."""
        part = -(-len(vector) // self.size)
        sent = torch.zeros(self.size * part, dtype=vector.dtype, device=self.device)
        sent[: len(vector)] = vector
        received = torch.empty_like(sent)
        with self._others_needed():
            dist.all_to_all_single(received, sent)
            total = added_in_order(torch.split(received, part))
            parts = [torch.empty_like(total) for _ in range(self.size)]
            dist.all_gather(parts, total)
        return torch.cat(parts)[: len(vector)].to(vector.device)

    def broadcast(self, data: bytes) -> bytes:
        """Returns the bytes of rank 0; what the others give does not matter."""
        length = torch.tensor([len(data)])
        with self._others_needed():
            dist.broadcast(length, src=0)
            sent = torch.zeros(int(length), dtype=torch.uint8)
            if self.rank == 0 and data:
                sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(sent, src=0)
        return bytes(sent.numpy())

    def tell(self, name: str, message: str) -> None:
        """Leaves a message for the others, which need not wait for it yet."""
        with self._others_needed():
            self._store.set(f"{_TOLD}{name}", message)

    def told(
        self,
        name: str,
        pause: Callable[[], object],
        timeout_s: float = TIMEOUT_S,
        before: str | None = None,
    ) -> str:
        """Waits for a message of another rank; returns "" once `pause` returns true.

        pause: waits a moment between two looks, and returns whether to give up. before: an earlier
        message of this name, which does not count. Raises RankGone after the timeout too.
        """
        deadline = time.monotonic() + timeout_s
        with self._others_needed():
            while (message := _found(self._store, f"{_TOLD}{name}")) in (None, before):
                if ended := self._ended():
                    raise RankGone(ended)
                if time.monotonic() > deadline:
                    raise RankGone(f"no rank has told {name} within {timeout_s:g} s")
                if pause():
                    return ""
            return str(message)

    def leave(self, reason: str) -> None:
        """Ends the membership: the others fail with this reason, unless they leave too.

        reason: "" if another rank has it.
        """
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"{_REASON}{self.rank}", reason)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _blocks(self, own: bytes, size: int) -> list[bytes]:
        """Returns the length of every message with its first `size` bytes, or zeros behind it."""
        content = (len(own).to_bytes(_LENGTH, "little") + own)[: _LENGTH + size]
        padded = bytearray(content.ljust(_LENGTH + size, b"\0"))
        block = torch.frombuffer(padded, dtype=torch.uint8)
        blocks = [torch.empty_like(block) for _ in range(self.size)]
        with self._others_needed():
            dist.all_gather(blocks, block)
        return [bytes(block.numpy()) for block in blocks]

    @contextmanager
    def _others_needed(self) -> Iterator[None]:
        try:
            yield
        except RankGone:
            raise
        except RuntimeError as error:
            raise RankGone(self._why(error)) from error

    def _why(self, error: RuntimeError) -> str:
        """Returns why the others cannot be reached, by their own words if they left some.

        Those of torch.distributed, about its own code, are for the log.
        """
        if ended := self._ended():
            return ended
        _log.info("torch.distributed: %s", str(error).strip())
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return f"another learner has not answered for {self._timeout_s:g} s"
        return "another learner has ended, or cannot be reached"

    def _ended(self) -> str:
        """Returns that others have ended, and why; "" if none has said so."""
        said = []
        with suppress(RuntimeError):  # the store is gone too
            for rank in range(self.size):
                if reason := _found(self._store, f"{_REASON}{rank}"):
                    said.append(f"rank {rank}: {reason}")
        return f"another learner has ended. {'; '.join(said)}" if said else ""


def meet(store: Any, rank: int, size: int, pause: Callable[[], None]) -> str:
    """Returns the name of this start, the same in all its ranks and in no other start.

    It returns once all ranks are there. store: a torch.distributed.Store. pause: waits a moment
    between two looks, and ends the meeting by what it raises. The ranks of the start before must
    have ended, as torchrun sees to.
    """
    return _lead(store, size, pause) if rank == 0 else _follow(store, rank, pause)


def _lead(store: Any, size: int, pause: Callable[[], None]) -> str:
    name = uuid.uuid4().hex
    while True:
        asked = [found for rank in range(1, size) if (found := _found(store, f"{_ASKS}{rank}"))]
        for number in asked:
            store.set(f"{_NAME}{number}", name)
        heard = [number for number in asked if _found(store, f"{_HEARD}{number}") == name]
        if len(heard) == size - 1:
            break
        pause()
    for number in heard:
        store.set(f"{_MET}{number}", "")
    return name


def _follow(store: Any, rank: int, pause: Callable[[], None]) -> str:
    number = uuid.uuid4().hex
    store.set(f"{_ASKS}{rank}", number)
    while (name := _found(store, f"{_NAME}{number}")) is None:
        pause()
    store.set(f"{_HEARD}{number}", name)
    while _found(store, f"{_MET}{number}") is None:
        pause()
    return name


def _found(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
