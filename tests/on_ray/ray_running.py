# SPDX-License-Identifier: Apache-2.0
"""A fleet that lends its workers to one source after the other."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torchbeast.fleets.fleet import WorkerLocation, WorkerLost

SOON = 30.0


class Pool:
    """A fleet that lends its workers to one source after the other: they take seconds to start."""

    shares_memory = False

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self._idle: list[Lent] = []
        self._lent: list[Lent] = []

    @property
    def own_node(self) -> str:
        return self._fleet.own_node

    @property
    def host(self) -> str:
        return self._fleet.host

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> Lent:
        made = self._idle.pop() if self._idle else Lent(self._fleet.worker(f"lent {name}"))
        self._lent.append(made)
        return made

    def put(self, value: Any) -> Any:
        return self._fleet.put(value)

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        return self._fleet.explain(error, place)

    @contextmanager
    def loan(self) -> Iterator[None]:
        """Lends workers to the source of a `with` block; ends those of one that fails."""
        try:
            yield
            for worker in self._lent:
                worker.give_back()
        except BaseException:
            for worker in self._lent:
                worker.kill()
            raise
        finally:
            self._idle += [worker for worker in self._lent if not worker.is_killed]
            self._lent = []

    def forget(self, index: int) -> None:
        """Keeps a lent worker, which is about to be killed, from being lent again."""
        self._lent[index].is_killed = True

    def clear(self) -> None:
        """Ends the workers that are not lent."""
        for worker in self._idle:
            worker.kill()
        self._idle = []


@dataclasses.dataclass
class Lent:
    """A worker that remembers whether it was killed."""

    worker: Any
    is_killed: bool = False

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        self.worker.call(then, method, *arguments)

    def give_back(self) -> None:
        """Closes its environments, so that it may be started again."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self.is_killed and self.worker.has_begun:
            for method in ("end", "close"):
                self.call(answers.put, method)
                answers.get(timeout=SOON)

    def kill(self) -> None:
        self.is_killed = True
        self.worker.kill()
