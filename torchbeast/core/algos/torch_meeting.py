# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet in a store which may still hold what ranks of earlier starts left there.

    rank 1   asks  "rank 1: 5f3e.." ----> rank 0
    rank 0   names the start, under "5f3e.." ----> rank 1
    rank 1   has heard it, under "5f3e.." ----> rank 0, which waits for all
    rank 0   all have met, under "5f3e.." ----> rank 1

torchrun keeps its store when it starts the ranks again (--max_restarts), and counts its starts
differently on each machine, so the ranks name each start themselves. Each asks with a number that
nobody had before, and believes only what is under this number. Rank 0 answers every number that it
finds, those of earlier starts too, until each rank's newest one has heard this start's name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

_ASKS = "meeting: rank "
_NAME = "meeting: name for "
_HEARD = "meeting: heard by "
_MET = "meeting: met by "


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
