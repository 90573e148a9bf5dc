# SPDX-License-Identifier: Apache-2.0
"""A list of hosts that changes while the run goes on: who is added, removed, warned about."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from background import SOON, Background

from torchbeast.sources.servers import host_list, hosts, joined_hosts
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.discovery import find_on
from torchbeast.sources.servers.host_list import HostList
from torchbeast.sources.servers.joined_hosts import RolloutShape

PLAIN = LearnerSecurityConfig(insecure=True)
CATCH: dict[str, Any] = {
    "protocol_version": 1,
    "env_id": "Catch",
    "num_envs": 4,
    "num_streams": 2,
    "num_servers": 1,
    "frame_stack": 1,
    "observation": ("float32", (10, 5)),
    "action_space": {"type": "Discrete", "n": 3, "start": 0},
}


class Pool:
    """The streams that a pool would have, by address."""

    def __init__(self, *addresses: str) -> None:
        self.streams = list(addresses)
        self.away: list[str] = []

    def away_streams(self) -> list[tuple[str, float, str]]:
        return [(address, 1.0, "") for address in self.away]

    def add(self, env_server_addresses: Sequence[str]) -> None:
        self.streams += env_server_addresses

    def remove(self, env_server_address: str) -> int:
        count = self.streams.count(env_server_address)
        self.streams = [a for a in self.streams if a != env_server_address]
        return count


class World:
    """A file of hosts, the servers that answer, and a pool; each look is a second later."""

    shape = RolloutShape(columns=4, env_bytes=1000)

    def __init__(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.file, self.now = file, 0.0
        self.served: dict[str, dict[str, Any]] = {"a:50": CATCH}
        self.refusing: set[str] = set()
        self.asked: list[str] = []
        self._caplog = caplog

    def describe(self, address: str, timeout_s: float, credentials: Any) -> dict[str, Any]:
        self.asked.append(address)
        if address in self.refusing:
            raise PermissionError(f"{address}: this is not its token")
        if address not in self.served:
            raise TimeoutError(f"nobody answers at {address}")
        return self.served[address]

    def begin(self) -> None:
        self.write("a:50")
        self.fleet = find_on(hosts.hosts(str(self.file)), None, 1.0, PLAIN)
        self.pool = Pool(*self.fleet.stream_addresses)
        self.list = HostList(str(self.file), self.fleet, PLAIN)

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def look(self, times: int = 2) -> list[str]:
        """Looks this often; returns what was said meanwhile."""
        self._caplog.clear()
        for _ in range(times):
            self.now += 1
            self.list.look(self.pool, self.shape, self.now)
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> World:
    caplog.set_level(logging.INFO, "torchbeast")
    world = World(tmp_path / "hosts.txt", caplog)
    monkeypatch.setattr("libtorchbeast.describe", world.describe)
    monkeypatch.setattr(host_list, "ANSWER_S", 0.0)
    monkeypatch.setattr("torchbeast.sources.servers.discovery.explain", lambda *_: None)
    world.begin()
    return world


def test_a_host_that_is_written_into_the_file_is_added_with_all_its_servers(world: World) -> None:
    world.served |= {f"b:{port}": CATCH | {"num_servers": 2} for port in (50, 51)}
    world.write("a:50\nb:50\n")
    assert world.look() == ["added host b:50 (4 streams)"]
    assert world.pool.streams == ["a:50", "a:50", "b:50", "b:50", "b:51", "b:51"]
    assert world.look(20) == []


def test_a_host_that_is_taken_from_the_file_is_removed(world: World) -> None:
    world.served |= {f"b:{port}": CATCH | {"num_servers": 2} for port in (50, 51)}
    world.write("a:50\nb:50\n")
    world.look()
    world.write("a:50\n")
    assert world.look() == ["removed host b:50 (4 streams)"]
    assert world.pool.streams == ["a:50", "a:50"]


def test_hosts_that_do_not_answer_hold_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked at once: the answer of the last one named ends the wait of the others."""
    has_answered = threading.Event()
    describe = world.describe

    def after_the_last(address: str, timeout_s: float, credentials: Any) -> dict[str, Any]:
        if address == "z:50":
            has_answered.set()
        elif not address.startswith("a") and not has_answered.wait(SOON):
            has_answered.set()
            raise AssertionError("one is asked after the other")
        return describe(address, timeout_s, credentials)

    world.served["z:50"] = CATCH
    monkeypatch.setattr("libtorchbeast.describe", after_the_last)
    silent = [f"b{number}:50" for number in range(20)]
    world.write("\n".join(["a:50", *silent, "z:50"]))
    said = world.look()
    assert "added host z:50 (2 streams)" in said and len(said) == 21
    assert world.look() == [], "each is warned of once"


def test_hosts_that_were_restarted_are_asked_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut one of three is back, with more streams than before."""
    world.served |= {"b:50": CATCH, "c:50": CATCH}
    world.write("a:50\nb:50\nc:50")
    world.look()
    for gone in ("a:50", "b:50"):
        del world.served[gone]
    world.served["c:50"] = CATCH | {"num_streams": 5}
    world.pool.away = ["a:50", "b:50", "c:50"]
    all_three = threading.Barrier(3)
    describe = world.describe

    def together(address: str, timeout_s: float, credentials: Any) -> dict[str, Any]:
        all_three.wait(SOON)
        return describe(address, timeout_s, credentials)

    monkeypatch.setattr("libtorchbeast.describe", together)
    assert world.look(1) == ["removed host c:50 (2 streams)", "added host c:50 (5 streams)"]


def test_hosts_that_replace_others_are_added_first(world: World) -> None:
    """So that the pool is not without streams in between."""
    world.served["b:50"] = CATCH
    world.write("b:50")
    assert world.look() == ["added host b:50 (2 streams)", "removed host a:50 (2 streams)"]
    assert world.pool.streams == ["b:50", "b:50"]


def test_a_list_whose_hosts_all_stay_away_says_that_the_run_ends(world: World) -> None:
    world.write("b:50")
    said = world.look(3)
    assert said[1:] == [
        "removed host a:50 (2 streams)",
        "no host is left: the run ends within a minute unless one is added",
    ]
    world.served["b:50"] = CATCH
    assert world.look(15) == ["added host b:50 (2 streams)"]


def test_a_file_that_is_read_while_it_is_written_changes_nothing(world: World) -> None:
    world.write("")
    said = world.look(5)
    assert len(said) == 1 and "names no host" in said[0] and "the hosts that it has" in said[0]
    world.served["b:50"] = CATCH
    world.write("b:50\n")  # the first half
    assert world.look(1) == []
    world.write("b:50\na:50\n")
    assert world.look() == ["added host b:50 (2 streams)"]
    assert world.pool.streams == ["a:50", "a:50", "b:50", "b:50"]


def test_a_file_that_is_gone_or_wrong_is_told_once_and_again_after_it_was_right(
    world: World,
) -> None:
    world.file.unlink()
    [said] = world.look(3)
    assert "cannot be read as a list of hosts" in said
    world.write("a:50")
    assert world.look() == []
    world.write("a:50\nno port\n")
    [said] = world.look(3)
    assert "HOST:PORT with a port" in said
    assert world.pool.streams == ["a:50", "a:50"]


def test_a_host_that_does_not_answer_is_tried_again_until_it_does(world: World) -> None:
    world.write("a:50\nb:50")
    [said] = world.look(40)
    assert said.startswith("the host b:50 is not used: no environment server answers at b:50")
    assert said.endswith("it is tried again")
    world.served["b:50"] = CATCH
    assert world.look(15) == ["added host b:50 (2 streams)"]


def test_a_host_of_which_one_server_is_missing_is_not_added_in_part(world: World) -> None:
    world.served["b:50"] = CATCH | {"num_servers": 2}
    world.write("a:50\nb:50")
    [said] = world.look(3)
    assert "answers at b:51" in said and world.pool.streams == ["a:50", "a:50"]


def test_a_host_with_another_environment_is_named_beside_the_first_and_not_used(
    world: World,
) -> None:
    world.served["b:50"] = CATCH | {"env_id": "Memory"}
    world.write("a:50\nb:50")
    [said] = world.look(40)
    assert "the servers at a:50 and b:50 must serve the same" in said
    assert "env_id is 'Catch' and 'Memory'" in said
    assert world.pool.streams == ["a:50", "a:50"]


def test_a_new_host_is_compared_with_the_first_even_if_that_is_gone(world: World) -> None:
    world.served["b:50"] = CATCH
    world.write("b:50")
    world.look()
    world.served["c:50"] = CATCH | {"frame_stack": 4}
    world.write("b:50\nc:50")
    [said] = world.look()
    assert "their frame_stack is 1 and 4" in said


def test_streams_that_rollouts_cannot_be_cut_from_are_not_used(world: World) -> None:
    world.served["b:50"] = CATCH | {"num_envs": 6}
    world.write("a:50\nb:50")
    [said] = world.look()
    assert "a stream of b:50 has 6 environments, and rollouts of this run join 4" in said


def test_a_stream_whose_rollouts_are_too_large_is_not_used(world: World) -> None:
    """A run whose pool holds such a stream ends."""
    world.served["b:50"] = CATCH | {"num_envs": 4 << 21}
    world.write("a:50\nb:50")
    [said] = world.look()
    assert "rollouts of a stream of b:50 would take 8.4 GB, expected at most 7.5 GB" in said
    world.served["b:50"] = CATCH
    assert world.look(20) == ["added host b:50 (2 streams)"]


def test_a_host_whose_rollouts_the_memory_cannot_hold_is_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.shape = RolloutShape(columns=4, env_bytes=1_000_000)
    world.served["b:50"] = CATCH
    world.write("a:50\nb:50")
    monkeypatch.setattr(joined_hosts, "free_memory", lambda: 7_900_000)
    [said] = world.look()
    assert "its 8 environments would take 8.0 MB of memory, but 7.9 MB are free" in said
    monkeypatch.setattr(joined_hosts, "free_memory", lambda: 7_800_000)
    assert world.look(20) == [], "that other amounts are free is not said at each try"
    monkeypatch.setattr(joined_hosts, "free_memory", lambda: 8_000_000)
    assert world.look(20) == ["added host b:50 (2 streams)"]


def test_hosts_that_come_together_share_the_free_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has taken its part when the next one is looked at."""
    world.shape = RolloutShape(columns=4, env_bytes=1_000_000)
    world.served |= {"b:50": CATCH, "c:50": CATCH}
    world.write("a:50\nb:50\nc:50")
    monkeypatch.setattr(joined_hosts, "free_memory", lambda: 15_900_000)
    added, refused = world.look()
    assert added == "added host b:50 (2 streams)"
    assert "its 8 environments would take 8.0 MB of memory, but 7.9 MB are free" in refused
    assert world.look(100)[0] == "added host c:50 (2 streams)", "b has taken its part by then"


def test_a_host_whose_streams_the_process_has_no_room_for_is_not_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.sources.servers.stream_limit.allowed_descriptors", lambda: 219)
    world.served["b:50"] = CATCH | {"num_streams": 3}
    world.write("a:50\nb:50")
    [said] = world.look()
    assert "5 streams need 220 files and connections, but this process may have 219" in said
    world.shape = world.shape._replace(ranks=2)
    assert world.look(20) == ["added host b:50 (3 streams)"], "two learners share the streams"


def test_a_host_that_was_restarted_is_not_counted_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.shape = RolloutShape(columns=4, env_bytes=1_000_000)
    monkeypatch.setattr(joined_hosts, "free_memory", lambda: 15_900_000)
    for streams in (3, 2, 3):
        world.served["a:50"], world.pool.away = CATCH | {"num_streams": streams}, ["a:50"]
        assert world.look(20)[1] == f"added host a:50 ({streams} streams)"


def test_a_server_of_a_host_that_is_named_already_is_not_used_twice(world: World) -> None:
    world.served |= {f"b:{port}": CATCH | {"num_servers": 2} for port in (50, 51)}
    world.write("a:50\nb:50\nb:51")
    said = world.look()
    assert said[0] == "added host b:50 (4 streams)" and "b:51 belongs to a host" in said[1]


def test_a_host_that_comes_back_is_asked_anew(world: World) -> None:
    world.served["b:50"] = CATCH
    for streams in (2, 3):
        world.served["b:50"] = CATCH | {"num_streams": streams}
        world.write("a:50\nb:50")
        assert world.look() == [f"added host b:50 ({streams} streams)"]
        world.write("a:50")
        assert world.look() == [f"removed host b:50 ({streams} streams)"]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_listed_host_that_was_restarted_with_other_servers_is_replaced(
    world: World, is_back: bool
) -> None:
    """Its first server is where it was, so the pool may have connected to it again by then."""
    del world.served["a:50"]
    world.pool.away = ["a:50"]
    assert world.look(3) == []
    world.served |= {f"a:{port}": CATCH | {"num_servers": 2} for port in (50, 51)}
    world.pool.away = [] if is_back else ["a:50"]
    assert world.look(15) == ["removed host a:50 (2 streams)", "added host a:50 (4 streams)"]
    world.pool.away = []
    assert world.look(40) == []
    assert world.pool.streams == ["a:50", "a:50", "a:51", "a:51"]


def test_a_listed_host_that_refuses_is_told_with_its_reason_once_an_outage(world: World) -> None:
    for _ in range(2):
        world.pool.away, world.refusing = ["a:50"], {"a:50"}
        assert world.look(40) == ["the streams of a:50 stay away: a:50: this is not its token"]
        world.pool.away, world.refusing = [], set()
        assert world.look(40) == []
    assert world.pool.streams == ["a:50"] * 2


def test_hosts_that_are_named_one_by_one_are_asked_after_a_restart_too(world: World) -> None:
    world.list = HostList("a:50", world.fleet, PLAIN)
    world.pool.away, world.served["a:50"] = ["a:50"], CATCH | {"num_streams": 3}
    assert world.look() == ["removed host a:50 (2 streams)", "added host a:50 (3 streams)"]


def test_a_restart_between_two_looks_at_the_list_is_noticed(world: World) -> None:
    world.pool.away = ["a:50"]
    world.list.glance(world.pool, world.now)
    world.pool.away = []
    world.served["a:50"] = CATCH | {"num_streams": 3}
    assert world.look(1) == ["removed host a:50 (2 streams)", "added host a:50 (3 streams)"]
    assert world.asked == ["a:50"] * 2, "its streams come as they leave: nobody is asked between"


def test_a_listed_host_that_was_restarted_with_another_environment_is_removed(
    world: World,
) -> None:
    world.served["b:50"] = CATCH
    world.write("a:50\nb:50")
    assert world.look() == ["added host b:50 (2 streams)"]
    world.served["b:50"] = CATCH | {"env_id": "Pong", "num_streams": 3}
    world.pool.away = ["b:50"]
    removed, warning = world.look(1)
    assert removed == "removed host b:50 (2 streams)"
    assert warning.startswith("the host b:50 is not used: ") and "Pong" in warning
    assert world.pool.streams == ["a:50"] * 2


def test_streams_are_looked_at_between_two_looks_at_the_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is read too seldom for the two seconds that a restart may take."""
    monkeypatch.setattr(host_list, "_GLANCE_S", 0.001)
    monkeypatch.setattr(host_list, "_INTERVAL_S", 1e9)
    closed, glances = threading.Event(), itertools.count()

    def glance(streams: Any, now: float) -> None:
        if next(glances) == 3:
            closed.set()

    monkeypatch.setattr(world.list, "glance", glance)
    Background(world.list.follow, world.pool, world.shape, closed).result()


def test_hosts_that_do_not_answer_hold_up_no_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_list, "_GLANCE_S", 0.001)
    monkeypatch.setattr(host_list, "_INTERVAL_S", 0.0)
    limits: queue.Queue[float] = queue.Queue()
    closed, goes_on = threading.Event(), threading.Event()

    def describe(address: str, timeout_s: float, credentials: Any) -> dict[str, Any]:
        limits.put(timeout_s)
        assert goes_on.wait(SOON)
        raise TimeoutError

    monkeypatch.setattr("libtorchbeast.describe", describe)
    monkeypatch.setattr("torchbeast.sources.servers.discovery.explain", _never)
    monkeypatch.setattr(host_list, "ANSWER_S", 2.0)
    world.list = HostList(str(world.file), world.fleet, PLAIN)
    world.write("a:50\nb:50\nc:50\nd:50")
    following = Background(world.list.follow, world.pool, world.shape, closed)
    for _ in "bcd":
        limits.get(timeout=SOON)
    closed.set()
    goes_on.set()
    following.result()
    assert limits.empty(), "none is asked again"


def _never(*_: Any) -> None:
    raise AssertionError("an end waits for seconds")


def test_a_listed_host_that_comes_back_as_it_was_keeps_its_streams(world: World) -> None:
    world.pool.away = ["a:50"]
    assert world.look(20) == []
    world.pool.away = []
    assert world.look(20) == []
    world.served["a:50"] = CATCH | {"num_streams": 3}
    assert world.look(40) == [], "a host that was not away is not asked"


def test_a_host_that_is_away_is_not_asked_at_every_look(world: World) -> None:
    del world.served["a:50"]
    world.pool.away = ["a:50"]
    world.asked.clear()
    world.look(30)
    assert world.asked == ["a:50"] * 2


def test_a_name_is_resolved_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["10.0.0.1"]
    monkeypatch.setattr(hosts, "resolved", lambda *_: [(2, 1, 6, "", (a, 50)) for a in addresses])
    world.served |= {f"actors@10.0.0.{i}:50": CATCH for i in range(1, 4)}
    named = "dns:///actors:50"
    fleet = find_on(hosts.hosts(named), None, 1.0, PLAIN)
    world.pool, world.list = Pool(*fleet.stream_addresses), HostList(named, fleet, PLAIN)
    addresses[:] = ["10.0.0.2", "10.0.0.3"]
    world.look()
    assert sorted(set(world.pool.streams)) == ["actors@10.0.0.2:50", "actors@10.0.0.3:50"]


def test_a_name_whose_addresses_come_in_another_order_each_time_is_followed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]

    def rotated(*_: object) -> list[tuple[Any, ...]]:
        addresses.append(addresses.pop(0))
        return [(2, 1, 6, "", (address, 50)) for address in addresses]

    monkeypatch.setattr(hosts, "resolved", rotated)
    world.served |= {f"actors@10.0.0.{i}:50": CATCH for i in range(1, 5)}
    named = "dns:///actors:50"
    fleet = find_on(hosts.hosts(named), None, 1.0, PLAIN)
    world.pool, world.list = Pool(*fleet.stream_addresses), HostList(named, fleet, PLAIN)
    assert world.look(3) == []
    addresses.append("10.0.0.4")
    assert world.look(2) == ["added host actors@10.0.0.4:50 (2 streams)"]
    addresses.remove("10.0.0.1")
    assert world.look(2) == ["removed host actors@10.0.0.1:50 (2 streams)"]
