# SPDX-License-Identifier: Apache-2.0
"""A run begins with the hosts that are there, whoever else comes and goes meanwhile."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from background import SOON

from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.discovery import Asking, Host, NoAnswerError
from torchbeast.sources.tunnel import door_main, door_process
from torchbeast.sources.tunnel.door import Visit
from torchbeast.sources.tunnel.door_process import DoorProcess, find_visitors

DESCRIPTION: dict[str, Any] = {
    "env_id": "Catch",
    "num_envs": 1,
    "num_streams": 1,
    "num_servers": 1,
    "frame_stack": 1,
    "observation": ("uint8", (3,)),
    "action_space": {"type": "Discrete", "n": 3, "start": 0},
}


class Hosts:
    """A door's hosts, and how their servers answer."""

    def __init__(self) -> None:
        self.visits: dict[str, Visit] = {}
        self.count = 0
        self.while_asked: dict[str, Callable[[], object]] = {}  # what happens during each question
        self.asked: list[str] = []
        self.told: list[tuple[str, str]] = []

    def comes(self, label: str, address: str = "") -> None:
        self._report(Visit(label, [address or f"unix:{label}"], True))

    def goes(self, label: str) -> None:
        self._report(Visit(label, self.visits[label].addresses, False))

    def restarts(self, label: str) -> None:
        self.goes(label)
        self.comes(label)

    def _report(self, visit: Visit) -> None:
        self.visits[visit.label] = visit
        self.count += 1

    def find(
        self,
        timeout: float = 30.0,
        stopped: Callable[[], bool] = lambda: False,
        num_actors: int | None = None,
    ) -> list[str]:
        """Returns the names of the hosts with which a run begins."""
        fleet = find_visitors(cast(DoorProcess, self), num_actors, timeout, stopped)
        return [host.name for host in fleet.hosts]

    # --- as DoorProcess

    listen = "a:1"

    def tell(self, label: str, sentence: str) -> None:
        self.told.append((label, sentence))

    def changes(self) -> int:
        return self.count

    def here(self) -> list[Visit]:
        return [visit for visit in self.visits.values() if visit.is_here]

    def is_latest(self, visit: Visit) -> bool:
        return self.visits[visit.label] is visit

    # --- as described

    def ask(self, visit: Visit, asking: Asking) -> Host:
        """Answers for a host that stayed while it was asked."""
        self.asked.append(visit.label)
        happens = self.while_asked.get(visit.label)
        if happens is not None:
            happens()
        if self.visits[visit.label] is not visit:
            assert asking._stopped(), "nobody waits for a host that is gone"
            raise RunError("a server does not answer")
        return Host(visit.label, dict.fromkeys(visit.addresses, DESCRIPTION))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr(door_process, "described", made.ask)
    return made


def test_a_host_that_dies_while_it_is_asked_does_not_keep_the_others_out(hosts: Hosts) -> None:
    hosts.comes("b")
    hosts.comes("a")
    hosts.while_asked["b"] = lambda: hosts.goes("b")
    assert hosts.find() == ["a"]
    assert sorted(hosts.asked) == ["a", "b"]


def test_a_host_that_leaves_and_comes_back_while_it_is_asked_is_asked_again(hosts: Hosts) -> None:
    def restarts() -> None:
        del hosts.while_asked["a"]
        hosts.restarts("a")

    hosts.comes("a")
    hosts.while_asked["a"] = restarts
    assert hosts.find() == ["a"]
    assert hosts.asked == ["a"] * 2


def test_those_who_are_there_are_asked_even_if_the_other_died_at_the_timeout(hosts: Hosts) -> None:
    hosts.comes("b")
    hosts.comes("a")
    hosts.while_asked["b"] = lambda: hosts.goes("b")
    assert hosts.find(timeout=-1.0) == ["a"]


def test_a_host_that_restarts_whenever_it_is_asked_costs_the_others_no_second_question(
    hosts: Hosts,
) -> None:
    def restarts() -> None:
        if hosts.asked.count("loop") == 3:
            hosts.comes("late")
        hosts.restarts("loop")

    hosts.comes("a")
    hosts.comes("loop")
    hosts.while_asked["loop"] = restarts
    assert hosts.find(num_actors=2) == ["a", "late"]
    assert hosts.asked.count("a") == 1 and hosts.asked.count("loop") >= 4


def test_a_host_that_restarts_whenever_it_is_asked_does_not_outlast_the_timeout(
    hosts: Hosts,
) -> None:
    def restarts() -> None:
        assert hosts.asked.count("loop") < 50, "it is asked without end"
        hosts.restarts("loop")

    hosts.comes("loop")
    hosts.while_asked["loop"] = restarts
    with pytest.raises(RunError, match="only loop dialled in at a:1 within 0.2 s"):
        hosts.find(timeout=0.2)


def test_a_host_that_comes_back_with_other_servers_is_described_by_those(hosts: Hosts) -> None:
    def others_come() -> None:
        hosts.comes("a", "unix:others")
        hosts.while_asked.clear()

    hosts.comes("a")
    hosts.comes("b")
    hosts.while_asked["b"] = others_come
    found = find_visitors(cast(DoorProcess, hosts), 2, 30.0, lambda: False)
    assert found.stream_addresses == ["unix:others", "unix:b"]


def test_hosts_are_asked_at_the_same_time(hosts: Hosts) -> None:
    together = threading.Barrier(3)
    for label in ("a", "b", "c"):
        hosts.comes(label)
        hosts.while_asked[label] = lambda: together.wait(SOON)
    assert hosts.find() == ["a", "b", "c"]


def test_a_host_that_stays_and_does_not_answer_ends_the_start(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RunError("no environment server answers")

    hosts.comes("a")
    monkeypatch.setattr(door_process, "described", fails)
    with pytest.raises(RunError, match="no environment server answers"):
        hosts.find()
    assert hosts.told == [("a", "the learner ends, because no environment server answers")]


def test_a_host_that_does_not_answer_is_left_out_where_others_do(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(visit: Visit, asking: Asking) -> Host:
        if visit.label == "b":
            raise NoAnswerError("no environment server answers at b")
        return hosts.ask(visit, asking)

    monkeypatch.setattr(door_process, "described", ask)
    hosts.comes("a")
    hosts.comes("b")
    assert hosts.find() == ["a"]
    [said] = caplog.messages
    assert said == "the run begins without the host b: no environment server answers at b"


def test_the_end_of_the_run_ends_the_wait(hosts: Hosts) -> None:
    with pytest.raises(RunError, match="the run ended while it waited for hosts"):
        hosts.find(stopped=lambda: True)


class Child:
    """A child process that the test plays."""

    def __init__(self, *_: object, on_report: Callable[[dict[str, Any]], None], **__: object):
        self.report = on_report


@pytest.fixture
def opened(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> DoorProcess:
    monkeypatch.setattr(door_process, "ChildProcess", Child)
    return DoorProcess(Supervisor(), "a:1", ServerSecurityConfig(insecure=True))


def test_hosts_that_are_away_are_forgotten_where_the_door_has_no_place_for_them(
    opened: DoorProcess,
) -> None:
    """Pods have other names every time, for weeks. A door has 256 places."""
    report = cast(Child, opened._process).report
    for label in ("stays", *(f"pod-{i}" for i in range(1000))):
        visit = {"label": label, "addresses": ["unix:a"], "is_here": True, "why": ""}
        report({"visit": visit})
        if label != "stays":
            report({"visit": visit | {"is_here": False}})
    known = [visit.label for visit in opened.visits()]
    assert known == ["stays", *(f"pod-{i}" for i in range(745, 1000))]
    assert [visit.label for visit in opened.here()] == ["stays"]


def test_a_door_that_cannot_start_leaves_no_folder(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*_: object, **__: object) -> None:
        assert len(list(runtime_folder.iterdir())) == 1
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(door_process, "ChildProcess", no_process)
    with pytest.raises(OSError, match="temporarily"):
        DoorProcess(Supervisor(), "a:1", ServerSecurityConfig(insecure=True))
    assert list(runtime_folder.iterdir()) == []


def test_a_door_with_too_long_a_path_for_sockets_does_not_start(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime_folder / ("x" * 70)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(UsageError, match="give a shorter TMPDIR"):
        DoorProcess(Supervisor(), "a:1", ServerSecurityConfig(insecure=True))
    assert list(long.iterdir()) == []


def test_a_door_that_accepts_nobody_any_more_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the learner would wait for hosts beside a door that is deaf."""

    class Deaf:
        is_open = True

        async def accept(self, listener: object) -> None:
            raise RuntimeError("a fault of the program")

        def close(self) -> None:
            self.is_open = False

    async def never(_: object) -> bool:
        await asyncio.get_running_loop().create_future()
        return False

    door, reports = Deaf(), []
    monkeypatch.setattr(door_main, "_open", lambda *_: ([None], door))
    monkeypatch.setattr(door_main, "_end_of_stdin", never)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        asyncio.run(asyncio.wait_for(door_main._run({}, reports.append), 5.0))
    assert reports == [{"ready": True}] and not door.is_open
