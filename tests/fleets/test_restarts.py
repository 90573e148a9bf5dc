# SPDX-License-Identifier: Apache-2.0
"""Which workers are replaced, and which ends of a worker fail the run."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from background import Background, wait_for

from torchbeast.errors import RunError, UsageError
from torchbeast.fleets import supervisor as supervision
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.supervisor import RestartPolicy, Restarts, Supervisor

KILLED = ProcessDied("was killed")
TAKEN = UsageError("the port is taken")


class Desk:
    """A place that counts its starts."""

    def __init__(self, name: str) -> None:
        self.name, self.restart_policy = name, RestartPolicy()
        self.starts = 0
        self.failures: list[Exception] = []  # of the next starts

    def start(self) -> None:
        if self.failures:
            raise self.failures.pop()
        self.starts += 1


class Office:
    """Two places, of which the first has a worker that works."""

    def __init__(self) -> None:
        self.restarts = Restarts(logging.getLogger("torchbeast.tests"))
        self.supervisor = self.restarts.supervisor = Supervisor()
        self.first, self.second = Desk("worker 0"), Desk("worker 1")
        self.restarts.start(self.first)
        self.restarts.start(self.second)
        self.restarts.works(self.first)


@pytest.fixture
def office() -> Office:
    return Office()


def test_a_worker_that_was_killed_is_replaced_even_before_it_worked(office: Office) -> None:
    office.restarts.ended(office.second, KILLED)
    assert office.second.starts == 2 and office.restarts.replaced == 1
    assert not office.supervisor.ended


def test_a_worker_that_dies_before_any_has_worked_fails_the_run() -> None:
    group, desk = Restarts(logging.getLogger("torchbeast.tests")), Desk("worker 0")
    supervisor = group.supervisor = Supervisor()
    group.start(desk)
    group.ended(desk, KILLED)
    assert desk.starts == 1 and str(supervisor.failure) == "worker 0: was killed"


def test_a_worker_that_reports_an_error_fails_the_run(office: Office) -> None:
    office.restarts.ended(office.first, RunError("the cartridge cannot be read"))
    assert office.first.starts == 1
    assert str(office.supervisor.failure) == "worker 0: the cartridge cannot be read"


def test_a_first_worker_that_cannot_start_fails_the_run_even_if_another_works(
    office: Office,
) -> None:
    office.restarts.ended(office.second, TAKEN)
    assert office.supervisor.failure is not None and office.supervisor.failure.error is TAKEN


def test_the_fifth_death_in_one_place_fails_the_run(office: Office) -> None:
    """Deaths in other places do not count: a machine short of memory may kill several."""
    office.restarts.ended(office.first, KILLED)
    for _ in range(4):
        office.restarts.ended(office.second, KILLED)
    assert not office.supervisor.ended and office.restarts.replaced == 5
    office.restarts.ended(office.second, KILLED)
    assert str(office.supervisor.failure) == (
        "worker 1: 5 processes died in its place within 0 s. The last one: was killed"
    )


def test_a_replacement_that_cannot_start_counts_as_a_death(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_PAUSE_S", 0.0)
    office.restarts.ended(office.first, KILLED)
    for _ in range(3):
        office.restarts.ended(office.first, TAKEN)
    assert not office.supervisor.ended and office.first.starts == 5
    office.restarts.ended(office.first, TAKEN)
    assert office.supervisor.failure is not None
    assert type(office.supervisor.failure.error) is ProcessDied
    assert str(office.supervisor.failure).endswith("The last one: the port is taken")


@pytest.mark.parametrize(("apart", "ends"), [(149.9, True), (150.0, False)])
def test_five_deaths_within_ten_minutes_end_the_program_and_slower_ones_never_do(
    apart: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: now[0]))
    policy, found = RestartPolicy(), []
    policy.works()
    for _ in range(5 if ends else 20):
        found.append(policy.too_many(TAKEN) is not None)
        now[0] += apart
    assert found == ([False] * 4 + [True] if ends else [False] * 20)
    assert policy.pause() == 90, "the pause has an end"


def test_the_pause_after_failed_starts_grows_until_a_process_works() -> None:
    policy, error = RestartPolicy(), UsageError("the port is taken")
    assert not policy.may_pass(error)
    policy.works()
    assert not policy.may_pass(error), "not that of a process that works"
    pauses = []
    for death in (ProcessDied("killed"), error, error, error):
        policy.too_many(death)
        assert policy.may_pass(error)
        pauses.append(policy.pause())
    assert pauses == [0, 10, 30, 90]
    policy.works()
    policy.too_many(ProcessDied("killed"))
    assert policy.pause() == 0


def test_closing_ends_the_pause_and_nobody_starts(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    office.restarts.ended(office.first, KILLED)
    ended = Background(office.restarts.ended, office.first, TAKEN)
    wait_for(lambda: "the port is taken. Starting a replacement in 10 s" in caplog.text)
    office.restarts.close()
    ended.result()
    assert office.first.starts == 2 and office.supervisor.failure is None


def test_a_failure_in_the_start_of_a_worker_ends_the_run(office: Office) -> None:
    office.supervisor.on_close(office.restarts.close)
    office.second.start = lambda: office.supervisor.fail("worker 1", TAKEN)  # type: ignore[method-assign]
    Background(office.restarts.start, office.second).result()
    assert office.restarts.closed.is_set()


def test_nobody_is_replaced_once_closed(office: Office) -> None:
    office.restarts.close()
    office.restarts.ended(office.second, KILLED)
    assert office.second.starts == 1 and office.supervisor.failure is None


NO_THREAD = RunError("no thread can be started")
NO_MEMORY = OSError(12, "Cannot allocate memory")


def test_a_replacement_that_the_system_cannot_start_is_tried_again(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_PAUSE_S", 0.0)
    office.first.failures = [NO_THREAD, NO_MEMORY]
    office.restarts.ended(office.first, KILLED)
    assert not office.supervisor.ended and office.first.starts == 2


def test_a_run_fails_if_the_system_never_starts_a_replacement(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end closes the places."""
    monkeypatch.setattr(supervision, "_PAUSE_S", 0.0)
    office.supervisor.on_close(office.restarts.close)
    office.first.failures = 5 * [NO_MEMORY]
    Background(office.restarts.ended, office.first, KILLED).result()
    assert office.first.starts == 1 and "Cannot allocate memory" in str(office.supervisor.failure)


def test_the_successor_of_a_worker_whose_node_has_left_may_fail_to_start(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_PAUSE_S", 0.0)
    office.restarts.replace(office.first, KILLED)  # as for a worker whose node has left
    office.restarts.ended(office.first, TAKEN)
    assert not office.supervisor.ended and office.first.starts == 3
