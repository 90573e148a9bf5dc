# SPDX-License-Identifier: Apache-2.0
"""Gathers the answers of workers to a task.

    synchronous     start all -------- wait for all -------------> [(0, a), (1, b), (2, c)]
    asynchronous    start all -------- wait for the first -------> [(1, b)]     start 1 again

A worker has one task at a time, so at most one answer per worker is queued.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import Failed, WorkerLost

Mode = Literal["synchronous", "asynchronous"]
Then = Callable[[Any], None]


class Workers(NamedTuple):
    """Workers by number.

    call: lets a worker execute a method, without waiting; `then` receives the answer.
    explain: returns the error about a lost worker, with everything that is known about it.
    """

    names: list[str]
    call: Callable[[int, Then, str, tuple[Any, ...]], None]
    explain: Callable[[int, WorkerLost], WorkerLost] = lambda index, error: error


class Task(NamedTuple):
    """A method for a worker to execute, with its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()


class Inbox:
    """Answers that have arrived. Any thread puts, one thread takes.

    Closing: `close` ends the current wait and all later ones.
    """

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Number of answers that have not been taken."""
        return self._answers.qsize()

    def put(self, index: int, answer: Any) -> None:
        """Adds the answer of a worker."""
        self._answers.put((index, answer))

    def take(self) -> tuple[int, Any] | None:
        """Returns the next answer; None once closed."""
        answer = self._answers.get()
        if answer is None:
            self.close()  # for the next wait
        return answer

    def close(self) -> None:
        """Ends every wait."""
        self._answers.put(None)


def gather(
    workers: Workers,
    task: Callable[[int], Task],
    mode: Mode,
    fraction: float = 1.0,
    *,
    inbox: Inbox,
    hurry: Callable[[int], None] = lambda index: None,
) -> Iterator[list[tuple[int, Any]]]:
    """Yields answers with the numbers of their workers, until the inbox is closed.

    Synchronous: the answers of all workers, in the order of workers. When `fraction` of them have
    answered, it calls `hurry` for the others. Asynchronous: the first answer that arrives. When the
    caller asks for the next answers, the workers of the last ones start their next tasks.

    task: chooses the next task of a worker, just before it starts.

    Raises RunError or UsageError, with the name of the worker, if a worker has failed.
    """
    begin = _beginner(workers, task, inbox)
    everyone = range(len(workers.names))
    if mode == "synchronous":
        least = math.ceil(fraction * len(everyone))
        while (answers := _all(workers, begin, inbox, least, hurry)) is not None:
            yield answers
        return
    for index in everyone:
        begin(index)
    while (answer := inbox.take()) is not None:
        _raise_failure(workers, [answer])
        yield [answer]
        begin(answer[0])


def _beginner(workers: Workers, task: Callable[[int], Task], inbox: Inbox) -> Callable[[int], None]:
    def begin(index: int) -> None:
        method, arguments = task(index)
        workers.call(index, lambda answer: inbox.put(index, answer), method, arguments)

    return begin


def _all(
    workers: Workers,
    begin: Callable[[int], None],
    inbox: Inbox,
    least: int,
    hurry: Callable[[int], None],
) -> list[tuple[int, Any]] | None:
    """Returns the answers of all workers in their order; None if the inbox was closed."""
    everyone = range(len(workers.names))
    for index in everyone:
        begin(index)
    found: dict[int, Any] = {}
    while len(found) < len(everyone):
        answer = inbox.take()
        if answer is None:
            return None
        found[answer[0]] = answer[1]
        if not _is_consequence(answer[1]):
            _raise_failure(workers, [answer])
        if len(found) == least:
            for index in set(everyone) - set(found):
                hurry(index)
    _raise_failure(workers, found.items())
    return sorted(found.items())


def _raise_failure(workers: Workers, answers: Iterable[tuple[int, Any]]) -> None:
    """Raises the first failure among the answers, if there is any."""
    for index, answer in answers:
        if isinstance(answer, WorkerLost):
            answer = workers.explain(index, answer)
        if isinstance(answer, (Failed, BaseException)):
            raise _error(workers.names[index], answer)


def _is_consequence(answer: Any) -> bool:
    """Returns whether a worker failed only because another one did, whose answer says why."""
    return isinstance(answer, Failed) and answer.is_consequence


def _error(name: str, answer: Failed | BaseException) -> Exception:
    if not isinstance(answer, Failed):
        return RunError(f"{name}: {answer}")
    kind = UsageError if answer.usage else RunError
    return kind(f"{name}: {answer.error}")
