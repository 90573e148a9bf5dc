# SPDX-License-Identifier: Apache-2.0
"""Tests which dialled-in hosts a learner waits for, takes and refuses."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from background import SOON, Background, wait_for

from torchbeast import polybeast_learner
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastLearnerFlags
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.run.training import DONE, ENOUGH
from torchbeast.servers import joining
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.joining import JoinServer

CATCH: dict[str, Any] = {
    "env_id": "Catch",
    "num_envs": 2,
    "num_streams": 2,
    "frame_stack": 1,
    "observation": ("uint8", (1, 10, 5)),
    "action_space": {"type": "Discrete", "n": 3},
}


class FakeDoor:
    """In place of libtorchbeast.Door: a list of streams that come, in this order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.coming: list[tuple[int, str, dict[str, Any]]] = []
        self.gone: set[int] = set()
        self.taken: list[int] = []
        self.refused: dict[int, str] = {}
        self.ends: list[tuple[str, str]] = []
        self.here: dict[str, int] = {}
        self.is_deaf = self.is_closed = False
        self._next = 0

    def comes(self, host: str = "a", **said: Any) -> int:
        self.coming.append((self._next, host, CATCH | said))
        self._next += 1
        return self._next - 1

    def next(self, timeout_s: float) -> tuple[int, str, dict[str, Any]] | None:
        return self.coming.pop(0) if self.coming else None

    def waits(self, stream: int) -> bool:
        return stream not in self.gone

    def take(self, stream: int, pool: Any) -> None:
        self.taken.append(stream)

    def refuse(self, stream: int, reason: str) -> None:
        self.refused[stream] = reason

    def ended(self) -> list[tuple[str, str]]:
        ends, self.ends = self.ends, []
        return ends

    def hosts(self) -> list[tuple[str, int, int]]:
        counted = [(name, count, 2 * count) for name, count in self.here.items()]
        return [*counted, ("", 0, 2 * len(self.taken))]

    def close(self, *, run_has_ended: bool) -> None:
        self.is_closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDoor:
    made = FakeDoor()
    monkeypatch.setattr("libtorchbeast.Door", lambda *_, **__: made)
    monkeypatch.setattr(joining, "PortCheck", lambda _: Mock(is_deaf=lambda: made.is_deaf))
    monkeypatch.setattr(joining, "check_free", lambda _: None)
    monkeypatch.setattr(joining, "_SETTLED_S", 0.0)
    monkeypatch.setattr(joining, "_LOOK_S", 0.0)
    monkeypatch.setattr(joining, "free_memory", lambda: None)
    return made


@pytest.fixture
def hosts(fake: FakeDoor) -> JoinServer:
    return JoinServer("127.0.0.1:1", SecurityConfig(insecure=True))


def never() -> None:
    pass


def follow(hosts: JoinServer, fake: FakeDoor) -> None:
    """Follows until all that come were seen."""
    closed = threading.Event()
    run = Background(lambda: hosts.follow(None, 2, 1000, closed))
    wait_for(lambda: not fake.coming)
    closed.set()
    run.result()


def test_a_run_waits_for_as_many_environments_as_asked_and_shares_them_by_stream(
    hosts: JoinServer, fake: FakeDoor
) -> None:
    fake.comes("a"), fake.comes("b"), fake.comes("b", num_envs=4)
    fleet = hosts.find(8, 10.0, never)
    assert fleet.envs_per_stream == [2, 2, 4] and fleet.num_envs == 8
    assert list(fleet.stream_hosts) == ["a", "b", "b"]
    assert fleet.env.name == "Catch"


def test_a_host_that_has_left_again_does_not_count(hosts: JoinServer, fake: FakeDoor) -> None:
    fake.gone.add(fake.comes("gone"))
    with pytest.raises(
        RunError, match=r"no host dialled in at 127.0.0.1:1 within 0.2 s.*--learner"
    ):
        hosts.find(None, 0.2, never)
    fake.comes("here")
    with pytest.raises(
        RunError, match="only here dialled in .* fewer environments than --num_envs 9"
    ):
        hosts.find(9, 0.2, never)
    assert hosts.find(None, 0.2, never).stream_hosts == ["here"]


@pytest.mark.parametrize("lacks_files", [False, True])
def test_a_door_that_became_deaf_is_opened_again_once_files_can_be_opened(
    hosts: JoinServer,
    fake: FakeDoor,
    lacks_files: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    another = FakeDoor()
    fake.is_deaf = True
    fake.comes("only by the old door"), another.comes("again")
    monkeypatch.setattr("libtorchbeast.Door", lambda *_, **__: another)
    monkeypatch.setattr(joining, "PortCheck", lambda _: Mock(is_deaf=lambda: another.is_deaf))
    monkeypatch.setattr(joining, "can_open_files", lambda: not lacks_files)
    found = hosts.find(1, 10.0, never).stream_hosts
    assert fake.is_closed is not lacks_files
    assert found == (["only by the old door"] if lacks_files else ["again"])
    assert ("127.0.0.1:1 stopped accepting connections" in caplog.text) is not lacks_files
    hosts.close(run_has_ended=True)
    assert another.is_closed is not lacks_files


def test_a_door_that_cannot_be_opened_again_yet_is_tried_until_it_can(
    hosts: JoinServer,
    fake: FakeDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    another = FakeDoor()
    another.comes("again")
    results: list[Any] = [ConnectionError("the port is in use"), UsageError("no key"), another]
    monkeypatch.setattr("libtorchbeast.Door", Mock(side_effect=results))
    fake.is_deaf = True
    monkeypatch.setattr(joining, "PortCheck", lambda _: Mock(is_deaf=lambda: False))
    assert hosts.find(1, SOON, never).stream_hosts == ["again"]
    assert "no host can dial in now: the port is in use" in caplog.text


def deep(levels: int) -> Any:
    """Returns an action space of so many tuples, each in the one before."""
    space: Any = {"type": "Discrete", "n": 2}
    for _ in range(levels):
        space = {"type": "Tuple", "spaces": [space]}
    return space


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"action_space": {"type": "None"}}, "the description from senseless is not valid"),
        (
            {"action_space": {"type": "Box", "low": 0, "high": 1, "shape": [1 << 40]}},
            "the description from senseless is not valid",
        ),
        ({"action_space": {"type": "None" * 10_000}}, "is not valid"),
        ({"action_space": {"type": "Discrete", "n": float("inf")}}, "is not valid"),
        ({"options": 1}, "is not valid"),
        ({"action_space": deep(900)}, "nested too deeply"),
    ],
)
def test_a_host_whose_description_makes_no_sense_is_refused_and_another_awaited(
    hosts: JoinServer, fake: FakeDoor, said: dict[str, Any], reason: str
) -> None:
    senseless, _ = fake.comes("senseless", **said), fake.comes("sound")
    assert hosts.find(None, 10.0, never).stream_hosts == ["sound"]
    assert reason in fake.refused[senseless]
    assert len(fake.refused[senseless]) < 2100, "it may quote all that the host sent"


def test_a_stop_ends_the_wait_for_hosts(hosts: JoinServer) -> None:
    def check_goes_on() -> None:
        raise RunError("the run has ended")

    with pytest.raises(RunError, match="the run has ended"):
        hosts.find(None, 1e6, check_goes_on)


def test_a_host_that_comes_later_is_taken_and_told_of(
    hosts: JoinServer, fake: FakeDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fake.comes("a")
    hosts.find(None, 10.0, never)
    later = fake.comes("b", num_envs=4)
    hosts._look()  # nobody is there yet
    fake.here = {"a": 1, "b": 1}
    follow(hosts, fake)
    assert fake.taken == [first, later] and not fake.refused
    hosts._look(), hosts._look()  # their number stays the same
    said = capsys.readouterr().out
    assert said == "2 hosts joined: a (1 stream), b (1 stream)\n"


def test_many_hosts_that_join_change_or_leave_together_take_a_line(
    hosts: JoinServer,
    capsys: pytest.CaptureFixture[str],
    fake: FakeDoor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for streams in (1, 2, 0):
        fake.here = {f"h{i}": streams for i in range(1, 6)} if streams else {}
        hosts._look(), hosts._look()
    assert capsys.readouterr().out == (
        "5 hosts joined: h1 (1 stream), h2 (1 stream), h3 (1 stream) and 2 more\n"
        "5 hosts changed: h1 (2 streams), h2 (2 streams), h3 (2 streams) and 2 more\n"
    )
    assert "5 hosts left: h1, h2, h3 and 2 more" in caplog.text


def test_a_host_that_leaves_and_a_failed_environment_are_warnings(
    hosts: JoinServer, fake: FakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    fake.here = {"a": 2}
    hosts._look(), hosts._look()
    fake.here, fake.ends = {}, [("a", 'Traceback (most recent call last):\n  File "x"\nOops')]
    hosts._look()
    assert "an environment of a: Traceback" in caplog.text
    assert "host left" not in caplog.text, "its streams may leave one after the other"
    hosts._look()
    assert "1 host left: a" in caplog.text
    assert "no host is left; the run ends within a minute" in caplog.text


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {"env_id": "Memory"},
            "must have the same environment, but their env_id is 'Catch' and 'Memory'",
        ),
        ({"action_space": {"type": "Discrete", "n": 4}}, "action_space"),
        ({"num_envs": 3}, "its streams have 3 environments, and rollouts of this run combine 2"),
        ({"num_envs": 1 << 24}, "would take 16.8 GB of memory, but 7.5 GB is the limit"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_with_the_reason(
    hosts: JoinServer,
    fake: FakeDoor,
    caplog: pytest.LogCaptureFixture,
    said: dict[str, Any],
    reason: str,
) -> None:
    fake.comes("a")
    hosts.find(None, 10.0, never)
    again = [fake.comes("b", **said) for _ in range(2)]
    follow(hosts, fake)
    assert list(fake.refused) == again and len(fake.taken) == 1
    assert all(reason in why for why in fake.refused.values())
    assert caplog.text.count("ignoring the host b") == 1, "it dials again and again"


@pytest.mark.parametrize(
    "said",
    [
        {"observation_space": {"type": "ArraySpec", "shape": [1], "dtype": "01f4"}},
        {"options": {"task_returns": ["\ud800"]}},
    ],
)
def test_a_description_that_cannot_be_read_or_quoted_is_refused(
    hosts: JoinServer, fake: FakeDoor, said: dict[str, Any]
) -> None:
    fake.comes("a", **said), fake.comes("b")
    hosts.find(None, 10.0, never)
    follow(hosts, fake)
    assert [why.encode() for why in fake.refused.values()] and len(fake.taken) == 1


def test_hosts_of_the_start_that_differ_are_refused(hosts: JoinServer, fake: FakeDoor) -> None:
    fake.comes("a"), fake.comes("b", env_id="Memory")
    assert hosts.find(2, 10.0, never).num_envs == 2
    follow(hosts, fake)
    assert list(fake.refused) == [1]


def test_an_address_in_use_is_wrong_usage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen at {listen}"):
            JoinServer(listen, SecurityConfig(insecure=True))


def test_learners_count_the_environments_of_all_of_them(hosts: JoinServer, fake: FakeDoor) -> None:
    """The streams of a host need not be divisible among them."""
    fake.comes("a")
    with pytest.raises(RunError, match="fewer environments than --num_envs 7"):
        hosts.find(7, 0.2, never, lambda own: own + 4)
    assert hosts.find(6, 10.0, never, lambda own: own + 4).num_envs == 2


@pytest.mark.parametrize(
    ("reason", "has_ended"), [(DONE, True), (ENOUGH, True), ("SIGTERM", False)]
)
def test_hosts_end_with_a_run_that_is_complete_or_that_a_callback_stops(
    monkeypatch: pytest.MonkeyPatch, reason: str, has_ended: bool
) -> None:
    closed: list[bool] = []
    door = SimpleNamespace(close=lambda run_has_ended: closed.append(run_has_ended))
    monkeypatch.setattr(joining, "JoinServer", lambda *_: door)
    words = ["--listen", "127.0.0.1:50050", "--insecure"]
    flags = parse(PolyBeastLearnerFlags, "polybeast_learner", words)
    supervisor = Supervisor()
    with polybeast_learner._join_server(flags, supervisor, None):
        supervisor.stop(reason)
    assert closed == [has_ended]


def test_no_learner_starts_before_each_has_environments() -> None:
    """Later they wait for one another no longer than SILENT_S."""
    said: dict[str, str] = {}

    def told(name: str, pause: Any, before: str | None = None) -> str:
        return "" if said.get(name) in (None, before) else said[name]

    ranks = SimpleNamespace(tell=said.__setitem__, told=told)
    both: list[Any] = [SimpleNamespace(rank=rank, size=2, ranks=ranks) for rank in range(2)]
    assert polybeast_learner._of_all(both[0], 4) == 0
    assert polybeast_learner._of_all(both[1], 0) == 0
    assert polybeast_learner._of_all(both[1], 2) == 6
    assert polybeast_learner._of_all(both[0], 4) == 6


def test_memory_is_promised_for_as_long_as_a_stream_is_played(
    hosts: JoinServer, fake: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow environments use theirs late."""
    monkeypatch.setattr(joining, "free_memory", lambda: 5000)
    fake.comes("a")
    hosts.find(None, 10.0, never)
    clock = itertools.count(time.monotonic(), 100.0)
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=clock.__next__))
    fake.comes("b"), fake.comes("c")
    follow(hosts, fake)
    assert fake.taken == [0, 1] and list(fake.refused) == [2]
    assert "would take 0.0 MB of memory, but 0.0 MB are left beside" in fake.refused[2]


def test_a_run_waits_for_the_streams_without_which_it_would_end(
    hosts: JoinServer, fake: FakeDoor
) -> None:
    fake.comes("a")
    with pytest.raises(RunError, match="1 stream of the 2 that it needs .--min_streams."):
        hosts.find(None, 0.2, never, min_streams=2)
    fake.comes("b")
    assert list(hosts.find(None, 10.0, never, min_streams=2).stream_hosts) == ["a", "b"]


def test_memory_that_others_have_taken_since_is_not_promised(
    hosts: JoinServer, fake: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay may have been filled."""
    free = itertools.chain([100_000], itertools.repeat(5000))
    monkeypatch.setattr(joining, "free_memory", free.__next__)
    fake.comes("a")
    hosts.find(None, 10.0, never)
    fake.comes("b"), fake.comes("c"), fake.comes("d")
    follow(hosts, fake)
    assert fake.taken == [0, 1, 2] and list(fake.refused) == [3]


def test_a_learner_whose_hosts_suffice_says_that_another_one_lacks_them(
    hosts: JoinServer, fake: FakeDoor
) -> None:
    fake.comes("a")
    with pytest.raises(RunError, match="^a dialled in .*, but too few hosts at another learner"):
        hosts.find(2, 0.2, never, lambda own: 0)
