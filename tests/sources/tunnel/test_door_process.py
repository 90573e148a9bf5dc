# SPDX-License-Identifier: Apache-2.0
"""A run begins with the hosts that are there, whoever else comes and goes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from torchbeast.errors import RunError
from torchbeast.sources.tunnel import door_process
from torchbeast.sources.tunnel.door import Visit
from torchbeast.sources.tunnel.door_process import DoorProcess, find_visitors


class Hosts:
    """A door's hosts, and how their servers answer."""

    def __init__(self) -> None:
        self.visits: dict[str, Visit] = {}
        self.count = 0
        self.while_asked: list[Callable[[], None]] = []  # what happens during each question
        self.asked: list[list[str]] = []
        self.told: list[tuple[str, str]] = []

    def comes(self, label: str) -> None:
        self._report(Visit(label, [f"unix:{label}"], True))

    def goes(self, label: str) -> None:
        self._report(Visit(label, [f"unix:{label}"], False))

    def _report(self, visit: Visit) -> None:
        self.visits[visit.label] = visit
        self.count += 1

    def find(self, timeout: float = 30.0, stopped: Callable[[], bool] = lambda: False) -> Any:
        return find_visitors(cast(DoorProcess, self), None, timeout, stopped)

    # --- as DoorProcess

    listen = "a:1"

    def tell(self, label: str, sentence: str) -> None:
        self.told.append((label, sentence))

    def changes(self) -> int:
        return self.count

    def here(self) -> list[Visit]:
        return [visit for visit in self.visits.values() if visit.is_here]

    # --- as fleet_of_visits

    def ask(self, visits: Iterable[Visit], timeout: float, stopped: Callable[[], bool]) -> Any:
        """Answers for hosts that stayed while they were asked."""
        self.asked.append([visit.label for visit in visits])
        before, count = self.here(), self.count
        if self.while_asked:
            self.while_asked.pop(0)()
            assert stopped(), "nobody waits for a host that is gone"
        if not before or before != self.here() or self.count != count:
            raise RunError("a server does not answer")
        return self

    num_envs = 1


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr(door_process, "fleet_of_visits", made.ask)
    return made


def test_a_host_that_dies_while_it_is_asked_does_not_keep_the_others_out(hosts: Hosts) -> None:
    hosts.comes("b")
    hosts.comes("a")
    hosts.while_asked.append(lambda: hosts.goes("b"))
    assert hosts.find() is hosts
    assert hosts.asked == [["b", "a"], ["a"]]


def test_a_host_that_leaves_and_comes_back_while_it_is_asked_is_asked_again(hosts: Hosts) -> None:
    hosts.comes("a")

    def restarts() -> None:
        hosts.goes("a")
        hosts.comes("a")

    hosts.while_asked.append(restarts)
    assert hosts.find() is hosts
    assert hosts.asked == [["a"]] * 2


def test_those_who_are_there_are_asked_even_if_the_other_died_at_the_timeout(hosts: Hosts) -> None:
    hosts.comes("b")
    hosts.comes("a")
    hosts.while_asked.append(lambda: hosts.goes("b"))
    assert hosts.find(timeout=-1.0) is hosts


def test_a_host_that_stays_and_does_not_answer_ends_the_start(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RunError("no environment server answers")

    hosts.comes("a")
    monkeypatch.setattr(door_process, "fleet_of_visits", fails)
    with pytest.raises(RunError, match="no environment server answers"):
        hosts.find()
    assert hosts.told == [("a", "the learner ends, because no environment server answers")]


def test_the_end_of_the_run_ends_the_wait(hosts: Hosts) -> None:
    with pytest.raises(RunError, match="the run ended while it waited for hosts"):
        hosts.find(stopped=lambda: True)
