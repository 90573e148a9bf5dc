# SPDX-License-Identifier: Apache-2.0
"""Gathering answers: of everyone, of the first, and when some are slow or fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from torchbeast.core.update.torch_ranks import RankGone
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import WorkerLost
from torchbeast.gradients.workers import Gathering


class Answering:
    """Workers whose answers arrive in an order that the test chooses, by their numbers."""

    def __init__(self, count: int, arrivals: list[tuple[int, Any]]) -> None:
        self.names = [f"worker {index}" for index in range(count)]
        self.arrivals, self.asked, self.hurried = arrivals, [], []  # type: ignore[var-annotated]
        self.then: dict[int, list[Callable[[Any], None]]] = {}  # of tasks, the oldest first
        workers: list[Any] = [
            SimpleNamespace(call=partial(self._called, index)) for index in range(count)
        ]
        self.gathering = Gathering(self.names, workers, lambda index, error: error)

    def _called(self, index: int, then: Any, method: str) -> None:
        self.asked.append((index, method))
        self.then.setdefault(index, []).append(then)
        self._arrive()

    def _arrive(self) -> None:
        """Delivers the next answers, as far as their workers are asked."""
        while self.arrivals and self.then.get(self.arrivals[0][0]):
            index, answer = self.arrivals.pop(0)
            self.then[index].pop(0)(answer)

    def all(self, fraction: float = 1.0) -> Any:
        return self.gathering.all(lambda index: ("work",), fraction, self.hurried.append)

    def each(self) -> Any:
        return self.gathering.each(lambda index: ("work",))

    @property
    def nobody_works_ahead(self) -> bool:
        return self.gathering._answers.empty()


def first(workers: Answering, mode: str) -> Any:
    return workers.all() if mode == "synchronous" else next(workers.each(), None)


def test_synchronous_answers_come_in_the_order_of_workers_and_leave_nothing() -> None:
    workers = Answering(3, [(2, "c"), (0, "a"), (1, "b"), (1, "e"), (0, "d"), (2, "f")])
    assert workers.all() == ["a", "b", "c"]
    assert len(workers.asked) == 3 and workers.nobody_works_ahead
    assert workers.all() == ["d", "e", "f"]
    assert workers.hurried == [], "the last one has answered"


@pytest.mark.parametrize(("fraction", "hurried"), [(0.25, [0, 1, 3]), (0.5, [1, 3]), (0.6, [1])])
def test_the_others_are_hurried_once_enough_have_answered(
    fraction: float, hurried: list[int]
) -> None:
    workers = Answering(4, [(2, "c"), (0, "a"), (3, "d"), (1, "b")])
    assert len(workers.all(fraction)) == 4
    assert sorted(workers.hurried) == hurried


def test_asynchronous_answers_come_as_they_arrive_and_only_their_worker_goes_on() -> None:
    workers = Answering(3, [(1, "b"), (1, "e"), (0, "a")])
    answers = workers.each()
    assert next(answers) == (1, "b")
    assert [index for index, _ in workers.asked] == [0, 1, 2]
    assert next(answers) == (1, "e")
    assert [index for index, _ in workers.asked] == [0, 1, 2, 1]
    assert next(answers) == (0, "a")
    assert [len(workers.then[index]) for index in range(3)] == [0, 1, 1]
    assert workers.nobody_works_ahead


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_answers_to_the_tasks_of_an_interrupted_caller_are_dropped(mode: str) -> None:
    workers = Answering(2, [(0, "old"), (0, "new"), (1, "b")])

    def interrupted(index: int) -> tuple[str]:
        if index:
            raise KeyboardInterrupt
        return ("work",)

    with pytest.raises(KeyboardInterrupt):
        workers.gathering.all(interrupted)
    assert first(workers, mode) == (["new", "b"] if mode == "synchronous" else (0, "new"))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_failure_in_a_task_of_an_interrupted_caller_is_reported(mode: str) -> None:
    workers = Answering(2, [(1, RunError("the robot fell over"))])
    take = workers.gathering._take
    workers.gathering._take = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        workers.all()
    workers.gathering._take = take  # type: ignore[method-assign]
    with pytest.raises(RunError, match="worker 1: the robot fell over"):
        first(workers, mode)


def interrupt() -> Any:
    raise KeyboardInterrupt


def test_a_fraction_of_the_workers_is_not_rounded_up_by_an_inexact_product() -> None:
    assert 0.28 * 25 > 7
    workers = Answering(25, [(index, "a") for index in range(25)])
    workers.all(0.28)
    assert sorted(workers.hurried) == list(range(7, 25))


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_closing_ends_the_wait_and_every_later_one(mode: str) -> None:
    workers = Answering(2, [])
    workers.gathering.close()
    assert first(workers, mode) is None
    workers.then.clear()
    assert first(workers, mode) is None


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (RunError("no such head"), RunError),
        (UsageError("no such flag"), UsageError),
        (WorkerLost("process 3 died"), RunError),
    ],
)
def test_a_failure_names_its_worker_and_nobody_is_waited_for(
    mode: str, answer: Any, kind: type[Exception]
) -> None:
    workers = Answering(3, [(1, answer)])
    with pytest.raises(kind, match=r"worker 1: (no such|process 3)"):
        first(workers, mode)


def test_the_cause_is_reported_and_not_what_followed_from_it() -> None:
    follows = RankGone("another learner has ended")
    workers = Answering(3, [(0, follows), (2, "c"), (1, WorkerLost("was killed"))])
    with pytest.raises(RunError, match="worker 1: was killed"):
        workers.all()
    workers = Answering(2, [(0, follows), (1, follows)])
    with pytest.raises(RunError, match="worker 0: another learner has ended"):
        workers.all()
