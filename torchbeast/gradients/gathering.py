# SPDX-License-Identifier: Apache-2.0
"""Gathers the answers of workers to a task.

    all()     start all -------- wait for all -------------> [a, b, c]
    each()    start all -------- wait for the first -------> (1, b)     start 1 again

A worker has one task at a time, unless the gathering thread is interrupted. Then the next `all` or
`each` gives every worker another task, and drops the answers to the tasks before, but no failure.
"""

from __future__ import annotations

import functools
import math
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchbeast.core.update.torch_ranks import RankGone
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import Worker, WorkerLost, error_in
from torchbeast.fleets.waiting import running_time

Task = tuple[Any, ...]
"""The name of a method for a worker to execute, and its arguments."""


class Gathering:
    """Lets workers execute tasks, and gathers their answers.

    Methods get `task`, which chooses the next task of a worker, by its number, just before it
    starts. They raise RunError or UsageError, with the name of the worker, if a worker has failed.

    Threads: one thread gathers; any thread may call `close`.

    Attributes:
        doing: the current task of each busy worker, and when it started. Other threads change it.
    """

    def __init__(
        self,
        names: Sequence[str],
        workers: Sequence[Worker],
        explain: Callable[[int, WorkerLost], WorkerLost],
    ) -> None:
        """names: of the workers, of which there may be none yet. explain: returns the error about
        a lost worker, with everything that is known about it.
        """
        self.doing: dict[int, tuple[str, float]] = {}
        self._names, self._workers, self._explain = names, workers, explain
        self._number = 0  # of the current `all` or `each`
        self._answers: queue.SimpleQueue[tuple[int, int, Any] | None] = queue.SimpleQueue()

    def close(self) -> None:
        """Ends every wait, now and later."""
        self._answers.put(None)

    def all(
        self,
        task: Callable[[int], Task],
        fraction: float = 1.0,
        hurry: Callable[[int], None] = lambda index: None,
    ) -> list[Any] | None:
        """Returns the answers of all workers, or None if closed. When this fraction of the workers
        has answered, it calls `hurry` for the others.
        """
        everyone = range(len(self._names))
        self._number += 1
        for index in everyone:
            self._start(index, task)
        answers: dict[int, Any] = {}
        while len(answers) < len(everyone):
            if (taken := self._take()) is None:
                return None
            index, answer = taken
            answers[index] = answer
            if not isinstance(answer, RankGone):  # the cause follows
                self._check(index, answer)
            if len(answers) == max(1, math.ceil(round(fraction * len(everyone), 6))):
                for other in set(everyone) - set(answers):
                    hurry(other)
        for index, answer in answers.items():
            self._check(index, answer)
        return [answers[index] for index in everyone]

    def each(self, task: Callable[[int], Task]) -> Iterator[tuple[int, Any]]:
        """Yields answers as they arrive, with the numbers of their workers, until closed. When the
        caller asks for the next one, the worker of the last one starts its next task.
        """
        self._number += 1
        for index in range(len(self._names)):
            self._start(index, task)
        while (taken := self._take()) is not None:
            self._check(*taken)
            yield taken
            self._start(taken[0], task)

    def _start(self, index: int, task: Callable[[int], Task]) -> None:
        method, *arguments = task(index)
        self.doing[index] = method, running_time()
        self._workers[index].call(
            functools.partial(self._put, self._number, index), method, *arguments
        )

    def _put(self, number: int, index: int, answer: Any) -> None:
        self.doing.pop(index, None)
        self._answers.put((number, index, answer))

    def _take(self) -> tuple[int, Any] | None:
        """Returns the next answer; None once closed."""
        while (taken := self._answers.get()) is not None:
            number, index, answer = taken
            if number == self._number or isinstance(answer, Exception):
                return index, answer
        self.close()  # for the next wait
        return None

    def _check(self, index: int, answer: Any) -> None:
        """Raises the failure of a worker."""
        error = error_in(answer, functools.partial(self._explain, index))
        if error is not None:
            kind = UsageError if isinstance(error, UsageError) else RunError
            raise kind(f"{self._names[index]}: {error}")
