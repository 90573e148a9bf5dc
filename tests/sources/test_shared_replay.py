# SPDX-License-Identifier: Apache-2.0
"""A shared replay: what agents read of each other, and what becomes of it when one dies or lies."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import stat
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from background import SOON, Background, wait_for
from shared_running import agent_of, joining, service_at
from true_rows import BEGUN_WITH, Batch, Envs, empty_batch, fields

from torchbeast.core.nest_py import flatten, map_leaves
from torchbeast.core.storages.rollout_replay import NO_ROLLOUT, RolloutReplay
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.replay import Filled, OwnReplay, Replay, ReplayClosed
from torchbeast.sources.sharing.client import SharedReplayClient
from torchbeast.sources.sharing.joining import Joining
from torchbeast.sources.sharing.regions import Region, region_bytes
from torchbeast.sources.sharing.shared_replay import SharedReplay

T, B, S, K = 4, 3, 5, 2
SPARE = slice(B, B + S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.sock"


def how(name: str = "a", **settings: Any) -> Joining:
    return joining(fields(T, 1, K), B, S, name, **{"frame_stack": K, **settings})


def play(envs: Envs, agent: int) -> Batch:
    """A batch of rollouts of B environments of an agent."""
    return envs.batch([envs.next_rollout(agent, index) for index in range(B)])


def insert(replay: Replay, envs: Envs, agent: int, count: int = 20) -> None:
    for _ in range(count):
        replay.insert(play(envs, agent), slice(0, B))


def fill(replay: Replay, first_walk: int | None = None) -> tuple[Batch, Filled]:
    batch = empty_batch(T, B + S, K)
    filled = replay.fill(batch, SPARE, first_walk)
    assert filled is not None
    for leaf in flatten(batch):
        assert (np.ascontiguousarray(leaf[:, :B]).view(np.uint8) == 1).all(), "others' columns"
    return batch, filled


def check(batch: Batch, filled: Filled, envs: Envs) -> list[tuple[int, int]]:
    """Compares windows with the true rows bit for bit; returns agents and numbers of rows."""
    true, finals, found = empty_batch(T, B + S, K), [], []
    for column in range(B, B + S):
        life, second = envs.by_id[batch["policy_version"][1, column]]
        finals += [flatten(final) for final in envs.write(true, column, life, second - 1)]
        true["env_index"][:, column] = life.env_index
        true["rollout_index"][:, column] = NO_ROLLOUT
        if batch["policy_version"][0, column] == BEGUN_WITH:
            true["policy_version"][0, column] = BEGUN_WITH
        found.append((life.agent, second - 1))
    for name, nest in true.items():
        for leaf, expected in zip(flatten(batch[name]), flatten(nest), strict=True):
            assert leaf.tobytes() == expected.tobytes(), name
    given = list(zip(*filled.finals, strict=True))
    assert len(given) == len(finals)
    for leaves, expected in zip(given, finals, strict=True):
        assert [leaf.tobytes() for leaf in leaves] == [leaf.tobytes() for leaf in expected]
    return found


# --- what agents read


def test_agents_read_the_true_rows_of_each_other(path: Path) -> None:
    envs = Envs(0, T, K)
    with service_at(path), agent_of(path, how("a")) as a, agent_of(path, how("b")) as b:
        insert(a, envs, 0)
        insert(b, envs, 1)
        for agent in (a, b):
            rows = [row for _ in range(20) for row in check(*fill(agent), envs)]
            owners = [owner for owner, _ in rows]
            assert 20 < owners.count(0) < 80 and len(set(rows)) > 50


@pytest.mark.parametrize("first_walk", [None, 3])
def test_a_single_agent_reads_what_its_own_replay_would_give(
    path: Path, first_walk: int | None
) -> None:
    envs = Envs(1, T, K)
    own = OwnReplay(RolloutReplay(fields(T, 1, K), 300, K, seed=7))
    truncations = 0
    with service_at(path), agent_of(path, how(capacity=300, seed=7)) as shared:
        for replay in (own, shared):
            assert replay.fill(empty_batch(T, B + S, K), SPARE, first_walk) is None
        for _ in range(60):
            batch = play(envs, 0)
            for replay in (own, shared):
                replay.insert(batch, slice(0, B))
            assert own.facts() == shared.facts()
            assert (own.size, own.episodes) == (shared.size, shared.episodes)
            if own.episodes:
                (mine, expected), (other, found) = (fill(r, first_walk) for r in (own, shared))
                assert expected.begins == found.begins
                for one, another in zip(flatten(mine), flatten(other), strict=True):
                    assert one.tobytes() == another.tobytes()
                for one, another in zip(expected.finals, found.finals, strict=True):
                    assert one.tobytes() == another.tobytes() and one.shape == another.shape
                truncations += len(found.finals[0]) if found.finals else 0
    assert truncations > 20 and own.facts().fill == 1.0


def test_every_agent_walks_by_itself(path: Path) -> None:
    """The same number of a walk means another one for each agent."""
    envs = Envs(2, T, K, ends=0.02)
    with service_at(path), agent_of(path, how("a")) as a, agent_of(path, how("b")) as b:
        insert(a, envs, 0, count=40)
        before: dict[str, list[tuple[int, int]]] = {}
        went_on = 0
        for _ in range(20):
            for name, agent in (("a", a), ("b", b)):
                batch, filled = fill(agent, first_walk=0)
                found = check(batch, filled, envs)
                for place, begins in enumerate(filled.begins):
                    if not begins:
                        owner, row = before[name][place]
                        assert found[place] == (owner, row + T)
                        went_on += 1
                before[name] = found
    assert went_on > 50


def test_who_joins_again_begins_anew_and_keeps_what_it_inserted(path: Path) -> None:
    envs, again = Envs(3, T, K, ends=0.05), Envs(4, T, K, ends=0.05)
    with service_at(path) as service, agent_of(path, how("b")) as other:
        with agent_of(path, how("a")) as first:
            insert(first, envs, 0)
            for _ in range(3):
                fill(first, first_walk=0)
            assert not all(fill(first, first_walk=0)[1].begins)
        for _ in range(20):  # rollouts that have the numbers of those that were inserted
            play(again, 0)
        with agent_of(path, how("a")) as second:
            assert second.size == 20 * B * T
            assert all(fill(second, first_walk=0)[1].begins)
            second.insert(play(again, 0), slice(0, B))
        check(*fill(other), envs)
        assert service.replay.agents == {"b": 0, "a": 1}


def test_facts_are_those_of_all_agents(path: Path) -> None:
    envs = Envs(5, T, K)
    with service_at(path), agent_of(path, how("a")) as a, agent_of(path, how("b")) as b:
        insert(a, envs, 0, count=10)
        insert(b, envs, 1, count=5)
        for agent in (a, b, a):
            fill(agent)
        read, inserted = 3 * S, 15 * B
        assert a.facts().samples_per_insert == read / inserted
        assert a.facts().fill == (inserted + 2 * B) / (2000 // T), "each track has a row 0"
        assert a.size == inserted * T and a.episodes > 0 and a.capacity == 2000


# --- who may join


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"capacity": 3000}, "the shared replay has --replay_size 2000, this agent 3000"),
        ({"frame_stack": 1}, "the shared replay has a frame stack of 2, this agent 1"),
    ],
)
def test_an_agent_with_another_replay_is_refused(
    path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with service_at(path), agent_of(path, how("a")) as first:
        with pytest.raises(UsageError, match=sentence) as error:
            SharedReplayClient(str(path), how("b", **settings))
        assert "agents that share a replay have the same environment" in str(error.value)
        insert(first, Envs(0, T, K), 0)
        fill(first)


def test_an_agent_with_other_rollouts_is_refused(path: Path) -> None:
    other = {**fields(T, 1, K), "extras": {}}
    with service_at(path), agent_of(path, how("a")):
        with pytest.raises(UsageError, match="has --unroll_length 4, this agent 7"):
            SharedReplayClient(str(path), joining(fields(7, 1, K), B, S, frame_stack=K))
        with pytest.raises(UsageError, match=r"stores rows of extras float32 \[3\].*nothing more"):
            SharedReplayClient(str(path), joining(other, B, S, frame_stack=K))


def test_agents_may_have_other_batches(path: Path) -> None:
    envs = Envs(6, T, K)
    with service_at(path), agent_of(path, how("a")) as a:
        with agent_of(path, joining(fields(T, 1, K), 1, 1, "b", frame_stack=K)) as b:
            insert(a, envs, 0)
            b.insert(envs.batch([envs.next_rollout(1, 0)]), slice(0, 1))
            batch = empty_batch(T, 2, K)
            assert b.fill(batch, slice(1, 2), None) is not None


def test_memory_that_is_not_there_is_told_with_what_would_fit(path: Path) -> None:
    with service_at(path, free=100_000):
        with pytest.raises(UsageError, match=r"--replay_size 9000 needs .* at most --replay_size"):
            SharedReplayClient(str(path), how(capacity=9000))
        with pytest.raises(UsageError, match="the batches of one agent need .* of memory"):
            SharedReplayClient(str(path), joining(fields(T, 1, K), 9000, 1, frame_stack=K))
        with agent_of(path, how(capacity=100)) as agent:
            insert(agent, Envs(0, T, K), 0)


def test_an_agent_must_fit_beside_what_the_replay_has_yet_to_take(path: Path) -> None:
    size = region_bytes(how("b"))
    with service_at(path) as service, agent_of(path, how(capacity=T * 100)) as agent:
        replay, each = service.replay, service.replay._used.bytes_per_transition
        replay._free_memory = lambda: size + 50 * T * each
        with pytest.raises(ValueError, match="are free, .* of them for the replay"):
            replay.check_room(size)
        envs = Envs(0, T, K)
        while agent.facts().fill < 0.5:
            insert(agent, envs, 0, count=1)
        replay.check_room(size)
        with pytest.raises(ValueError, match="the batches of one agent need"):
            replay.check_room(size + T * each * 4)


def test_where_nobody_serves_it_is_told(path: Path) -> None:
    with pytest.raises(UsageError, match=r"no replay serves there \(No such file"):
        SharedReplayClient(str(path), how())
    with service_at(path):
        pass
    assert not path.exists()
    with pytest.raises(UsageError, match="AF_UNIX path too long"):
        SharedReplayClient("/" + "x" * 200, how())


def test_only_the_user_may_connect(path: Path) -> None:
    with service_at(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_newer_of_two_agents_with_one_name_stays(path: Path) -> None:
    supervisor = Supervisor()
    with service_at(path), agent_of(path, how("a")) as old:
        insert(old, Envs(0, T, K), 0)
        old.start(supervisor)
        with agent_of(path, how("a")) as new:
            for _ in range(2):  # it stays so
                with pytest.raises(RunError, match="another run with the same name has joined"):
                    old.fill(empty_batch(T, B + S, K), SPARE, None)
            wait_for(lambda: supervisor.ended)
            assert "give each its own --xpid" in str(supervisor.failure)
            insert(new, Envs(1, T, K), 0)
            fill(new)
    assert supervisor.join(SOON) == []


# --- rollouts that cannot be stored


def test_rollouts_that_cannot_be_stored_are_refused_and_nothing_else(path: Path) -> None:
    envs = Envs(7, T, K)
    with service_at(path), agent_of(path, how()) as agent:
        insert(agent, envs, 0)
        wrong = play(envs, 0)
        wrong["observation"]["image"][2] += 1
        with pytest.raises(ValueError, match="is no stack that continues the row before"):
            agent.insert(wrong, slice(0, B))
        check(*fill(agent), envs)


def test_a_bool_that_is_neither_0_nor_1_is_refused(path: Path) -> None:
    with service_at(path), agent_of(path, how()) as agent:
        insert(agent, Envs(8, T, K), 0)
        wrong = play(Envs(8, T, K), 0)
        wrong["truncated"].view(np.uint8)[0] = 2
        with pytest.raises(ValueError, match="a bool is neither 0 nor 1"):
            agent.insert(wrong, slice(0, B))
        fill(agent)


# --- peers that lie


class RawAgent:
    """An agent that sends bytes of the test's choice."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SOON)
        self.socket.connect(str(path))

    def send(self, header: Any, payload: bytes = b"", said: int | None = None) -> None:
        """Sends a request; said: the size of the payload in its place."""
        text = json.dumps(header).encode()
        size = len(payload) if said is None else said
        self.socket.sendall(b"TBR1" + struct.pack("<IQ", len(text), size))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(text + payload)

    def join(self, joined: Joining) -> Region:
        self.send({"do": "join", **joined.as_json()})
        first, (descriptor,), _, _ = socket.recv_fds(self.socket, 1, 1)
        assert first == b"+" and self.answer()["episodes"] >= 0
        region = Region(joined, descriptor)
        os.close(descriptor)
        return region

    def answer(self) -> dict[str, Any]:
        magic, header, payload = struct.unpack("<4sIQ", self.exactly(16))
        assert magic == b"TBR1"
        found: dict[str, Any] = json.loads(self.exactly(header))
        self.exactly(payload)
        return found

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            assert piece, "the connection ended"
            data += piece
        return data

    def is_cut_off(self) -> bool:
        """Waits for the end of the connection; returns whether nothing but a refusal came."""
        with contextlib.suppress(ConnectionResetError):
            said = b""
            while piece := self.socket.recv(10_000):
                said += piece
            return b"refused" in said or not said
        return True


@contextlib.contextmanager
def raw(path: Path) -> Iterator[RawAgent]:
    agent = RawAgent(path)
    try:
        yield agent
    finally:
        agent.socket.close()


BEFORE_JOINING: dict[str, Any] = {
    "nothing of ours": b"GET / HTTP/1.1\r\n\r\n",
    "a huge header": b"TBR1" + struct.pack("<IQ", 2**32 - 1, 0),
    "a huge payload": b"TBR1" + struct.pack("<IQ", 2, 2**63) + b"{}",
    "no JSON": b"TBR1" + struct.pack("<IQ", 2, 0) + b"{]",
    "no UTF-8": b"TBR1" + struct.pack("<IQ", 2, 0) + b"\xff\xff",
    "deep JSON": b"TBR1" + struct.pack("<IQ", 100_000, 0) + b"[" * 100_000,
    "no object": b"TBR1" + struct.pack("<IQ", 2, 0) + b"[]",
    "no request": {"hello": 1},
    "an insertion": {"do": "insert", "finals": 0},
    "a fill": {"do": "fill", "first_walk": None},
    "nothing to join with": {"do": "join"},
}


@pytest.fixture
def honest(path: Path) -> Iterator[None]:
    """An agent that works before and after what the test does."""
    envs = Envs(9, T, K)
    with service_at(path), agent_of(path, how("honest")) as agent:
        insert(agent, envs, 0)
        yield
        insert(agent, envs, 0, count=2)
        check(*fill(agent), envs)
        assert agent.size == 22 * B * T, "only its own steps are stored"


@pytest.mark.parametrize("what", BEFORE_JOINING)
def test_who_does_not_join_is_cut_off(path: Path, honest: None, what: str) -> None:
    sent = BEFORE_JOINING[what]
    with raw(path) as liar:
        liar.socket.sendall(sent) if isinstance(sent, bytes) else liar.send(sent)
        assert liar.is_cut_off()


JOINING = how("liar").as_json()
WRONG_JOINING = {
    "no name": {"name": ""},
    "a long name": {"name": "x" * 501},
    "a name that is none": {"name": 7},
    "no columns": {"columns": 0},
    "too many columns": {"columns": 2**40},
    "columns that are no number": {"columns": 2.5},
    "a bool for a number": {"spare_columns": True},
    "a huge unroll": {"unroll_length": 2**31 - 1},
    "a huge capacity": {"capacity": 2**62},
    "no row": {"row": {}},
    "a row that is none": {"row": [1]},
    "another flag": {"row": {**JOINING["row"], "done": ["array", "int64"]}},
    "a field more": {"row": {**JOINING["row"], "x": ["array", "int64"]}},
    "a huge array": {"row": {**JOINING["row"], "action": ["array", "int64", 2**31 - 1]}},
    "a huge number": {"row": {**JOINING["row"], "action": ["array", "int64", 10**30]}},
    "a negative size": {"row": {**JOINING["row"], "action": ["array", "int64", -1]}},
    "objects": {"row": {**JOINING["row"], "action": ["array", "object"]}},
    "no dtype": {"row": {**JOINING["row"], "action": ["array", "nonsense"]}},
    "records": {"row": {**JOINING["row"], "action": ["array", "i4,i4"]}},
    "many dimensions": {"row": {**JOINING["row"], "action": ["array", "int8", *[1] * 33]}},
    "many leaves": {"row": {**JOINING["row"], "extras": ["tuple", *[["array", "int8"]] * 1001]}},
    "no nest": {"row": {**JOINING["row"], "extras": []}},
    "a number for a nest": {"row": {**JOINING["row"], "extras": 4}},
    "something more": {"x": 1},
}


@pytest.mark.parametrize("what", WRONG_JOINING)
def test_who_joins_with_nonsense_is_refused(path: Path, honest: None, what: str) -> None:
    with raw(path) as liar:
        liar.send({"do": "join", **JOINING, **WRONG_JOINING[what]})
        assert liar.is_cut_off()


@pytest.mark.parametrize("what", WRONG_JOINING)
def test_nonsense_of_the_first_agent_spoils_nothing(path: Path, what: str) -> None:
    with service_at(path):
        with raw(path) as liar:
            liar.send({"do": "join", **JOINING, **WRONG_JOINING[what]})
            assert liar.is_cut_off()
        with agent_of(path, how()) as agent:
            insert(agent, Envs(0, T, K), 0)
            fill(agent)


FINAL = K * 2 * 3 + 2 * K * 4  # bytes of one
WRONG_REQUESTS: dict[str, tuple[Any, bytes, int | None]] = {
    "an unknown one": ({"do": "save"}, b"", None),
    "another joining": ({"do": "join", **JOINING}, b"", None),
    "no number of finals": ({"do": "insert"}, b"", None),
    "a negative number": ({"do": "insert", "finals": -1}, b"", None),
    "more finals than rows": ({"do": "insert", "finals": T * B + 1}, b"", (T * B + 1) * FINAL),
    "finals that do not come": ({"do": "insert", "finals": 1}, b"", None),
    "finals of another size": ({"do": "insert", "finals": 1}, b"x" * (FINAL - 1), None),
    "a payload of nothing": ({"do": "fill", "first_walk": 0}, b"x", None),
    "a huge payload": ({"do": "insert", "finals": 1}, b"", 2**60),
    "a walk of no number": ({"do": "fill", "first_walk": "a"}, b"", None),
    "a walk of a huge number": ({"do": "fill", "first_walk": 2**40}, b"", None),
    "a negative walk": ({"do": "fill", "first_walk": -1}, b"", None),
}


@pytest.mark.parametrize("what", WRONG_REQUESTS)
def test_who_asks_for_nonsense_is_cut_off(path: Path, honest: None, what: str) -> None:
    with raw(path) as liar:
        liar.join(how("liar"))
        liar.send(*WRONG_REQUESTS[what])
        assert liar.is_cut_off()


def test_who_inserts_what_does_not_fit_its_flags_is_refused(path: Path, honest: None) -> None:
    with raw(path) as liar:
        region = liar.join(how("liar"))
        for leaf in flatten(region.inserted):
            leaf[...] = 0
        region.inserted["truncated"][1:] = True
        liar.send({"do": "insert", "finals": 1}, b"x" * FINAL)
        assert "12 truncations need as many final observations" in liar.answer()["refused"]
        region.inserted["truncated"].view(np.uint8)[...] = 3
        liar.send({"do": "insert", "finals": 0})
        assert "neither 0 nor 1" in liar.answer()["refused"]


def test_who_has_too_many_environments_is_refused(
    path: Path, honest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.sources.sharing.shared_replay._MOST_ENVIRONMENTS", 8)
    with raw(path) as liar:
        region = liar.join(joining(fields(T, 1, K), 9, S, "liar", frame_stack=K))
        for leaf in flatten(region.inserted):
            leaf[...] = 0
        region.inserted["env_index"][:] = np.arange(9)
        liar.send({"do": "insert", "finals": 0})
        assert "at most 8 environments" in liar.answer()["refused"]


def test_environments_that_were_refused_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchbeast.sources.sharing.shared_replay._MOST_ENVIRONMENTS", 8)
    replay = SharedReplay(lambda: None)
    agent = replay.join(joining(fields(T, 1, K), 9, S, "many", frame_stack=K))
    zeros = {**map_leaves(np.zeros_like, empty_batch(T, 9, K)), "final_observation": ()}
    zeros["env_index"] = np.tile(np.arange(9), (T + 1, 1))
    with pytest.raises(ValueError, match="at most 8 environments"):
        replay.insert(agent, zeros)
    zeros["env_index"] = np.zeros((T + 1, 9), np.int64)
    replay.insert(agent, zeros)
    assert replay.figures().size == 9 * T


def test_an_agent_that_reads_no_answers_holds_up_nobody(path: Path, honest: None) -> None:
    with raw(path) as deaf:
        deaf.join(how("deaf"))
        deaf.socket.settimeout(0.05)  # then both directions are full
        with pytest.raises(TimeoutError):
            for _ in range(10**6):
                deaf.send({"do": "fill", "first_walk": None})
        with agent_of(path, how("other")) as other:
            fill(other)


@pytest.mark.parametrize("whole", [0, 3, 16, 30, -1])
def test_an_agent_that_ends_within_a_request_is_forgotten(
    path: Path, honest: None, whole: int
) -> None:
    """whole: how many bytes of the request come."""
    text = json.dumps({"do": "insert", "finals": 1}).encode()
    request = b"TBR1" + struct.pack("<IQ", len(text), FINAL) + text + bytes(FINAL)
    with raw(path) as dying:
        dying.join(how("dying"))
        dying.socket.sendall(request[:whole])
    with raw(path) as dying:
        dying.join(how("dying"))


def test_the_memory_of_an_agent_is_free_as_soon_as_it_has_left(path: Path) -> None:
    gc.disable()
    try:
        with service_at(path) as service:
            with agent_of(path, how()):
                (region,) = [weakref.ref(each.region) for each in service._connections]
                assert region() is not None
            wait_for(lambda: region() is None)
    finally:
        gc.enable()


def test_agents_beyond_the_limit_are_not_accepted(
    path: Path, honest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.sources.sharing.service._MOST_CONNECTIONS", 3)
    with raw(path) as second, raw(path) as third, raw(path) as fourth:
        assert fourth.is_cut_off()
        second.join(how("second"))
        third.join(how("third"))


def test_names_beyond_the_limit_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchbeast.sources.sharing.shared_replay._MOST_AGENTS", 2)
    with service_at(path):
        for name in ("a", "b", "a"):
            with agent_of(path, how(name)):
                pass
        with pytest.raises(UsageError, match="2 agents have joined this replay already"):
            SharedReplayClient(str(path), how("c"))


def test_a_liar_is_named_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchbeast.replay_service"), service_at(path):
        with raw(path) as liar:
            liar.join(how("liar"))
            liar.send({"do": "save"})
            assert liar.is_cut_off()
    assert [record.getMessage() for record in caplog.records] == [
        "agent liar: there is no request 'save'"
    ]


# --- endings


def test_the_end_of_the_service_ends_the_run_of_an_agent_that_waits(path: Path) -> None:
    supervisor = Supervisor()
    with contextlib.ExitStack() as ending:
        with service_at(path):
            agent = ending.enter_context(agent_of(path, how()))
            agent.start(supervisor)
            assert not supervisor.ended
        wait_for(lambda: supervisor.ended)
        failure = str(supervisor.failure)
        assert f"the shared replay {path} has ended: what was learnt is in the chec" in failure
        assert "--replay_service" in failure
        with pytest.raises(RunError, match="has ended"):
            insert(agent, Envs(0, T, K), 0)
    assert supervisor.join(SOON) == []


def test_an_agent_that_leaves_is_no_failure(path: Path) -> None:
    supervisor = Supervisor()
    with service_at(path), agent_of(path, how()) as agent:
        agent.start(supervisor)
        agent.close()
        assert supervisor.join(SOON) == [] and not supervisor.ended
        for call in (lambda: insert(agent, Envs(0, T, K), 0), lambda: fill(agent)):
            with pytest.raises(ReplayClosed):
                call()


def test_closing_ends_a_call_that_waits_for_its_answer(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(path))
        silent.listen()
        joined = how()
        joining_ = Background(SharedReplayClient, str(path), joined)
        connection, _ = silent.accept()
        region = Region(joined)
        socket.send_fds(connection, [b"+"], [region.descriptor])
        figures = {"fill": 0, "samples_per_insert": 0, "size": 0, "episodes": 0}
        text = json.dumps({"agent": 0, **figures}).encode()
        connection.sendall(b"TBR1" + struct.pack("<IQ", len(text), 0) + text)
        agent = joining_.result()
        call = Background(fill, agent)
        connection.settimeout(SOON)
        while b'"fill"' not in connection.recv(10_000):  # the request to join came first
            pass
        agent.close()
        with pytest.raises(ReplayClosed):
            call.result()
        connection.close()
