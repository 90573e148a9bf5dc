# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet in one store again and again, in threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest
import torch.distributed as dist

from torchbeast.core.update.torch_ranks import meet

SIZE, LOOKS, SOON = 3, 5, 10.0


class Ended(Exception):
    """A rank is killed while it waits."""


class Looks:
    """The pause between looks, which ends the meeting once it is stopped."""

    def __init__(self) -> None:
        self._count = 0
        self.in_vain, self.stopped = Event(), Event()

    def __call__(self) -> None:
        self._count += 1
        if self._count > LOOKS:
            self.in_vain.set()
        if self.stopped.wait(0.002):
            raise Ended


class Starts:
    """Starts ranks that meet in the same store."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._store = pool, dist.HashStore()  # type: ignore[attr-defined]
        self._looks: list[Looks] = []

    def some(self, ranks: list[int]) -> list[tuple[Future[str], Looks]]:
        """Starts ranks."""
        looks = [Looks() for _ in ranks]
        self._looks += looks
        placed = zip(ranks, looks, strict=True)
        return [(self._pool.submit(meet, self._store, r, SIZE, look), look) for r, look in placed]

    def lonely(self, ranks: list[int]) -> list[tuple[Future[str], Looks]]:
        """Starts ranks, each of which looks around in vain."""
        started = self.some(ranks)
        for meeting, look in started:
            assert look.in_vain.wait(SOON) and not meeting.done(), "it met some who are not there"
        return started

    def all(self, first: list[int]) -> set[str]:
        """Starts all ranks, these first; returns the names that they agreed on."""
        early = self.lonely(first)
        late = self.some([rank for rank in range(SIZE) if rank not in first])
        return {meeting.result(SOON) for meeting, _ in [*early, *late]}

    def close(self) -> None:
        for look in self._looks:
            look.stopped.set()


@pytest.fixture
def starts() -> Iterator[Starts]:
    with ThreadPoolExecutor(2 * SIZE) as pool:
        made = Starts(pool)
        yield made
        made.close()


@pytest.mark.parametrize("first", [[0], [1, 2], [0, 1], [2]])
def test_each_start_has_a_name_of_its_own_whoever_comes_first(
    starts: Starts, first: list[int]
) -> None:
    found = [starts.all(first) for _ in range(4)]
    assert [len(names) for names in found] == [1] * 4, "one name for all ranks"
    assert len(set.union(*found)) == 4, "no name of an earlier start"


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_start_that_ended_before_all_had_met_is_no_part_of_the_next(
    starts: Starts, rank: int
) -> None:
    """One rank never came, and the others are killed while they wait for it."""
    others = [other for other in range(SIZE) if other != rank]
    for meeting, look in starts.lonely(others):
        look.stopped.set()
        with pytest.raises(Ended):
            meeting.result(SOON)
    for first in ([rank], others):
        assert len(starts.all(first)) == 1
