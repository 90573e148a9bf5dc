# SPDX-License-Identifier: Apache-2.0
"""Workers in processes of this machine: calls, lanes, and every way to end."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from torchbeast.errors import RunError
from torchbeast.fleets.fleet import LocalFleet, WorkerLost, returning_failures

TIMEOUT_S = 120.0
NAME = "test_local_fleet:Echo"


class Echo:
    """A worker that repeats what it is told."""

    LANES: ClassVar[Mapping[str, str]] = {"open": "control", "end": "control"}

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened, self._ended = threading.Event(), threading.Event()

    def say(self, what: Any) -> Any:
        return self._name, what

    def how_many(self) -> str | None:
        return os.environ.get("HOW_MANY")

    def wait(self) -> str:
        self._opened.wait(TIMEOUT_S)
        return "open"

    def fail(self) -> None:
        raise KeyError("nothing there")

    def open(self) -> None:
        self._opened.set()

    def wait_for_end(self) -> str:
        self._ended.wait(TIMEOUT_S)
        return "ended"

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    with LocalFleet(NAME, {"HOW_MANY": "3"}) as made:
        yield made


@pytest.fixture(scope="module")
def worker(fleet: LocalFleet) -> Any:
    return fleet.worker("echo 0")


def answer(worker: Any, method: str, *arguments: Any) -> Any:
    return pending(worker, method, *arguments).get(timeout=TIMEOUT_S)


def pending(worker: Any, method: str, *arguments: Any) -> queue.SimpleQueue[Any]:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker.call(found.put, method, *arguments)
    return found


def test_a_large_value_arrives_as_it_was_and_a_stored_one_as_itself(
    fleet: LocalFleet, worker: Any
) -> None:
    array = np.random.default_rng(0).normal(size=300_000)
    name, found = answer(worker, "say", {"array": array})
    assert name == "echo 0"
    np.testing.assert_array_equal(found["array"], array)
    assert answer(worker, "say", fleet.put(["stored", 1]))[1] == ["stored", 1]


def test_an_exception_is_an_answer_and_the_worker_goes_on(worker: Any) -> None:
    failed = answer(worker, "fail")
    assert isinstance(failed, RunError) and "nothing there" in str(failed)
    assert answer(worker, "say", 1)[1] == 1


def test_user_code_that_exits_is_an_exception_with_its_traceback() -> None:
    answer = returning_failures(sys.exit)(0)
    assert isinstance(answer, RunError) and "SystemExit: 0" in str(answer)


def test_ctrl_c_while_a_task_is_sent_does_not_cut_it_short(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = worker._connection.send_bytes

    def interrupted(message: bytes) -> None:
        signal.raise_signal(signal.SIGINT)
        send(message)

    monkeypatch.setattr(worker._connection, "send_bytes", interrupted)
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with pytest.raises(KeyboardInterrupt):
        worker.call(found.put, "how_many")
    assert found.get(timeout=TIMEOUT_S) == "3"


def test_another_lane_is_answered_while_a_call_is_busy(worker: Any) -> None:
    waiting = pending(worker, "wait")
    assert answer(worker, "open") is None
    assert waiting.get(timeout=TIMEOUT_S) == "open"


def test_a_worker_gets_the_variables_that_are_asked_for(worker: Any) -> None:
    assert answer(worker, "how_many") == "3"


def test_calls_of_a_worker_that_is_killed_are_answered_and_later_ones_too() -> None:
    with LocalFleet(NAME, {}) as fleet:
        worker = fleet.worker("echo 1")
        answer(worker, "say", 1)
        waiting = [pending(worker, "wait"), pending(worker, "say", 2)]
        os.kill(worker.process.pid, 9)
        for each in waiting:
            error = each.get(timeout=TIMEOUT_S)
            assert isinstance(error, Exception) and "was killed by SIGKILL" in str(error)
        assert "was killed by SIGKILL" in str(answer(worker, "say", 3))


def test_the_end_of_a_fleet_ends_a_busy_worker_and_answers_its_calls() -> None:
    with LocalFleet(NAME, {}) as fleet:
        worker = fleet.worker("echo 2")
        waiting, pid = pending(worker, "wait"), worker.process.pid
        answer(worker, "open")  # has been read after the request that waits
        assert waiting.get(timeout=TIMEOUT_S) == "open"
        worker_closed = pending(worker, "wait_for_end")
        answer(worker, "open")
    assert worker_closed.get(timeout=TIMEOUT_S) == "ended"
    assert isinstance(answer(worker, "say", 2), WorkerLost)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_cannot_be_made_says_why() -> None:
    with LocalFleet("test_local_fleet:Nothing", {}) as fleet:
        error = answer(fleet.worker("nothing"), "say", 1)
    assert "the module test_local_fleet has no 'Nothing'" in str(error)
