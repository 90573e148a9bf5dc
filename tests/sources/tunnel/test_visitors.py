# SPDX-License-Identifier: Apache-2.0
"""Hosts that come to a running learner are added, and those that stay away are removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("libtorchbeast._C")

from serving import serving

from torchbeast import envs
from torchbeast.errors import RunError
from torchbeast.sources.servers.discovery import Asking, Fleet, fleet_of_hosts
from torchbeast.sources.servers.joined_hosts import RolloutShape
from torchbeast.sources.tunnel import visitors as visitors_module
from torchbeast.sources.tunnel.door import Visit
from torchbeast.sources.tunnel.visitors import Visitors, described


class Streams:
    """Streams by the address of their server."""

    def __init__(self, *addresses: str) -> None:
        self.open = list(addresses)

    def add(self, addresses: list[str]) -> None:
        self.open += addresses

    def remove(self, address: str) -> int:
        before = len(self.open)
        self.open = [one for one in self.open if one != address]
        return before - len(self.open)

    def away_streams(self) -> list[tuple[str, float, str]]:
        return []


@pytest.fixture
def one(tmp_path: Path) -> Iterator[str]:
    address = f"unix:{tmp_path}/one"
    with serving(lambda: envs.make("Catch", 2), address):
        yield address


@pytest.fixture
def two(tmp_path: Path) -> Iterator[str]:
    address = f"unix:{tmp_path}/two"
    with serving(lambda: envs.make("Catch", 2), address, num_streams=2):
        yield address


def fleet_of(*visits: Visit) -> Fleet:
    return fleet_of_hosts([described(visit, Asking(10.0)) for visit in visits])


class Run:
    """A run that began with the host `one`."""

    def __init__(self, one: str) -> None:
        self.visits = {"one": Visit("one", [one], True)}
        self.streams = Streams(one)
        fleet = fleet_of(*self.visits.values())
        self.told: list[tuple[str, str]] = []
        self.visitors = Visitors(
            lambda: list(self.visits.values()), fleet, lambda *said: self.told.append(said)
        )

    def comes(self, label: str, *addresses: str) -> None:
        self.visits[label] = Visit(label, list(addresses), True)

    def goes(self, label: str) -> None:
        self.visits[label] = Visit(label, self.visits[label].addresses, False, "gone")

    def look(self, now: float, columns: int = 1) -> list[str]:
        self.visitors.look(self.streams, RolloutShape(columns, env_bytes=1000), now)
        return sorted(self.streams.open)


def test_a_host_that_comes_is_added_once_with_all_its_streams(one: str, two: str) -> None:
    run = Run(one)
    assert run.look(0.0) == [one]
    run.comes("two", two)
    assert run.look(1.0) == [one, two, two] == run.look(2.0)


def test_a_host_is_removed_after_half_a_minute_and_added_again_when_it_is_back(
    one: str, two: str
) -> None:
    run = Run(one)
    run.comes("two", two)
    run.look(0.0)
    run.goes("two")
    assert run.look(100.0) == [one, two, two] == run.look(129.9)
    assert run.look(130.0) == [one] == run.look(200.0)
    run.comes("two", two)
    assert run.look(201.0) == [one, two, two]


@pytest.mark.parametrize("is_away_first", [False, True])
def test_a_host_that_comes_back_at_other_addresses_is_described_again_and_replaced(
    one: str, two: str, is_away_first: bool
) -> None:
    run = Run(one)
    if is_away_first:
        run.goes("one")
        assert run.look(0.0) == [one]
    run.comes("one", two)
    assert run.look(1.0) == [two, two] == run.look(2.0)
    run.goes("one")
    assert run.look(40.0) == [two, two] == run.look(69.0)
    assert run.look(70.0) == []


def test_a_host_that_is_back_in_time_stays(one: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(one)
    run.goes("one")
    run.look(0.0)
    run.comes("one", one)
    run.look(20.0)
    run.goes("one")
    assert run.look(40.0) == [one] == run.look(69.0)
    assert "no host is left" not in caplog.text
    assert run.look(70.0) == []
    assert "no host is left: the run ends within a minute unless one is added" in caplog.text


def test_a_host_of_another_environment_is_not_used_and_tried_again_later(
    one: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = Run(one), f"unix:{tmp_path}/other"
    with serving(lambda: envs.make("Mock", 2), other):
        run.comes("other", other)
        assert run.look(0.0) == [one]
        why = "the servers at one and other must serve the same, but their "
        assert f"the host other is not used: {why}" in caplog.text
        ((label, sentence),) = run.told
        assert label == "other" and sentence.startswith(
            f"the learner does not use this host: {why}"
        )
    with serving(lambda: envs.make("Catch", 2), other):
        assert run.look(14.0) == [one]
        assert run.look(15.0) == sorted([one, other])
    assert caplog.text.count("is not used") == 1


def test_a_host_that_is_back_with_another_environment_is_told_apart_from_itself(
    one: str, tmp_path: Path
) -> None:
    run, other = Run(one), f"unix:{tmp_path}/other"
    with serving(lambda: envs.make("Mock", 2), other):
        run.comes("one", other)
        assert run.look(0.0) == []
    ((_, sentence),) = run.told
    assert "the servers at one (at the start) and one (now) must serve the same" in sentence


def test_a_host_that_was_not_used_is_asked_at_once_when_it_has_other_servers(
    one: str, two: str, tmp_path: Path
) -> None:
    run, other = Run(one), f"unix:{tmp_path}/other"
    with serving(lambda: envs.make("Mock", 2), other):
        run.comes("other", other)
        assert run.look(0.0) == [one]
    run.comes("other", two)
    assert run.look(1.0) == [one, two, two]


def test_a_host_whose_streams_do_not_fit_the_rollouts_is_not_used(
    one: str, two: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(one)
    run.comes("two", two)
    assert run.look(0.0, columns=4) == [one]
    assert "a stream of two has 2 environments, and rollouts of this run join 4" in caplog.text


def test_a_host_that_does_not_answer_holds_up_nothing_for_long(
    one: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(visitors_module, "ANSWER_S", 0.1)
    run = Run(one)
    with contextlib.suppress(FileNotFoundError):
        Path(tmp_path / "none").unlink()
    run.comes("none", f"unix:{tmp_path}/none")
    assert run.look(0.0) == [one]
    assert "the host none is not used: no environment server answers at none (waited" in caplog.text


def test_a_host_of_which_the_door_knows_nothing_any_more_is_removed_after_half_a_minute(
    one: str, two: str
) -> None:
    run = Run(one)
    run.comes("two", two)
    run.look(0.0)
    del run.visits["two"]
    assert run.look(100.0) == [one, two, two] == run.look(129.9)
    assert run.look(130.0) == [one]
    assert not run.visitors._away


def test_questions_to_hosts_that_the_door_has_forgotten_are_forgotten(
    one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods have another name every time."""
    monkeypatch.setattr(visitors_module, "ANSWER_S", 0.0)
    run = Run(one)
    for i in range(3):
        run.comes(f"pod-{i}", f"unix:{tmp_path}/none")
        run.look(float(i))
        assert run.visitors._asked.keys() == run.visitors._hosts._again.keys() == {f"pod-{i}"}
        del run.visits[f"pod-{i}"]


def test_hosts_of_different_environments_at_the_start_are_named_by_their_labels(
    one: str, tmp_path: Path
) -> None:
    """Nobody knows the sockets behind which the door hides them."""
    other = f"unix:{tmp_path}/other"
    with serving(lambda: envs.make("Mock", 2), other):
        here = [Visit("actors1", [one], True), Visit("actors2", [other], True)]
        with pytest.raises(RunError) as refused:
            fleet_of(*here)
    assert "the servers at actors1 and actors2 must serve the same" in str(refused.value)
    assert str(tmp_path) not in str(refused.value)
