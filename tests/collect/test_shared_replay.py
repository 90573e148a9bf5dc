# SPDX-License-Identifier: Apache-2.0
"""A shared replay: what agents read of each other, and what becomes of it when one dies or lies."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from background import SOON, Background, wait_for
from shared_running import agent_of, joining, service_at
from true_rows import BEGUN_WITH, Batch, Envs, empty_batch, fields

from torchbeast.collect.replay import JoinRequest, Replay, ReplayClosed, ReplayedColumns
from torchbeast.collect.shared_replay import SharedReplayClient, key_path
from torchbeast.core.base.nest import flatten
from torchbeast.core.storages.replay.rollout_replay import NO_ROLLOUT, RolloutReplay
from torchbeast.errors import RunError, UsageError

T, B, S, K = 4, 3, 5, 2
SPARE = slice(B, B + S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.sock"


def how(name: str = "a", **settings: Any) -> JoinRequest:
    return joining(fields(T, 1, K), B, S, name, **{"frame_stack": K, **settings})


def play(envs: Envs, agent: int) -> Batch:
    """A batch of rollouts of B environments of an agent."""
    return envs.batch([envs.next_rollout(agent, index) for index in range(B)])


def insert(replay: Replay, envs: Envs, agent: int, count: int = 20) -> None:
    for _ in range(count):
        replay.insert(play(envs, agent))


def fill(replay: Replay, first_walk: int | None = None) -> tuple[Batch, ReplayedColumns]:
    batch = empty_batch(T, B + S, K)
    filled = replay.fill(batch, SPARE, first_walk)
    assert filled is not None
    for leaf in flatten(batch):
        assert (np.ascontiguousarray(leaf[:, :B]).view(np.uint8) == 1).all(), "others' columns"
    return batch, filled


def check(batch: Batch, filled: ReplayedColumns, envs: Envs) -> list[tuple[int, int]]:
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
    own = RolloutReplay(fields(T, 1, K), 300, K, seed=7)
    truncations = 0
    with service_at(path), agent_of(path, how(replay_size=300, seed=7)) as shared:
        for replay in (own, shared):
            assert replay.fill(empty_batch(T, B + S, K), SPARE, first_walk) is None
        for _ in range(60):
            batch = play(envs, 0)
            for replay in (own, shared):
                replay.insert(batch)
            assert own.stats() == shared.stats()
            if own.stats().episodes:
                (mine, expected), (other, found) = (fill(r, first_walk) for r in (own, shared))
                assert expected.begins == found.begins
                for one, another in zip(flatten(mine), flatten(other), strict=True):
                    assert one.tobytes() == another.tobytes()
                for one, another in zip(expected.finals, found.finals, strict=True):
                    assert one.tobytes() == another.tobytes() and one.shape == another.shape
                truncations += len(found.finals[0]) if found.finals else 0
    assert truncations > 20 and own.stats().fill == 1.0


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
            assert second.stats().size == 20 * B * T
            assert all(fill(second, first_walk=0)[1].begins)
            second.insert(play(again, 0))
        check(*fill(other), envs)
        assert service.replay._numbers == {"b": 0, "a": 1}


def test_facts_are_those_of_all_agents(path: Path) -> None:
    envs = Envs(5, T, K)
    with service_at(path), agent_of(path, how("a")) as a, agent_of(path, how("b")) as b:
        insert(a, envs, 0, count=10)
        insert(b, envs, 1, count=5)
        for agent in (a, b, a):
            fill(agent)
        read, inserted = 3 * S, 15 * B
        assert a.stats().samples_per_insert == read / inserted
        assert a.stats().fill == (inserted + 2 * B) / (2000 // T), "each trajectory has a row 0"
        assert a.stats().size == inserted * T and a.stats().episodes > 0


# --- who may join


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replay_size": 3000}, "has replay_size 2000, this agent 3000"),
        ({"frame_stack": 1}, "has frame_stack 2, this agent 1"),
    ],
)
def test_an_agent_with_another_replay_is_refused(
    path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with service_at(path), agent_of(path, how("a")) as first:
        with pytest.raises(UsageError, match=sentence) as error:
            SharedReplayClient(str(path), how("b", **settings))
        assert "agents that share a replay need the same environment" in str(error.value)
        insert(first, Envs(0, T, K), 0)
        fill(first)


def test_an_agent_with_other_rollouts_is_refused(path: Path) -> None:
    other = {**fields(T, 1, K), "extras": {}}
    with service_at(path), agent_of(path, how("a")):
        with pytest.raises(UsageError, match="has unroll_length 4, this agent 7"):
            SharedReplayClient(str(path), joining(fields(7, 1, K), B, S, frame_stack=K))
        with pytest.raises(UsageError, match="has row .*extras"):
            SharedReplayClient(str(path), joining(other, B, S, frame_stack=K))


def test_agents_may_have_other_batches(path: Path) -> None:
    envs = Envs(6, T, K)
    with service_at(path), agent_of(path, how("a")) as a:
        with agent_of(path, joining(fields(T, 1, K), 1, 1, "b", frame_stack=K)) as b:
            insert(a, envs, 0)
            b.insert(envs.batch([envs.next_rollout(1, 0)]))
            batch = empty_batch(T, 2, K)
            assert b.fill(batch, slice(1, 2), None) is not None


def test_memory_that_is_not_there_is_told_with_what_would_fit(path: Path) -> None:
    with service_at(path, free=100_000):
        with pytest.raises(UsageError, match=r"replay_size 9000 needs .* at most replay_size"):
            SharedReplayClient(str(path), how(replay_size=9000))
        with agent_of(path, how(replay_size=100)) as agent:
            insert(agent, Envs(0, T, K), 0)


def test_where_nobody_serves_it_is_told(path: Path) -> None:
    with pytest.raises(UsageError, match=r"no replay is running there \(.*No such file"):
        SharedReplayClient(str(path), how())


def test_only_the_user_may_connect_and_read_the_key(path: Path) -> None:
    with service_at(path):
        for file in (path, key_path(path)):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_newer_of_two_agents_with_one_name_stays(path: Path) -> None:
    with service_at(path), agent_of(path, how("a")) as old:
        insert(old, Envs(0, T, K), 0)
        with agent_of(path, how("a")) as new:
            for _ in range(2):  # it stays so
                with pytest.raises(RunError, match="joined the .*: use another --xpid"):
                    old.fill(empty_batch(T, B + S, K), SPARE, None)
            insert(new, Envs(1, T, K), 0)
            fill(new)


# --- rollouts that cannot be stored


# --- peers without the key, and agents that misbehave


@pytest.fixture
def honest(path: Path) -> Iterator[None]:
    """An agent that works before and after what the test does."""
    envs = Envs(9, T, K)
    with service_at(path), agent_of(path, how("honest")) as agent:
        insert(agent, envs, 0)
        yield
        insert(agent, envs, 0, count=2)
        check(*fill(agent), envs)
        assert agent.stats().size == 22 * B * T, "only its own steps are stored"


@contextlib.contextmanager
def connected(path: Path) -> Iterator[Connection[Any, Any]]:
    """A connection that has not shown the key."""
    with Client(str(path), "AF_UNIX") as connection:
        yield connection


class Opened:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_nothing_is_unpickled_of_a_peer_without_the_key(path: Path, honest: None) -> None:
    made = path.with_name("made")
    with connected(path) as stranger:
        stranger.send(Opened(made))
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            answer_challenge(stranger, b"another key")
    assert not made.exists()


def test_an_agent_unpickles_nothing_of_a_service_without_the_key(path: Path) -> None:
    made = path.with_name("made")
    key_path(path).write_bytes(b"the key")
    with Listener(str(path), "AF_UNIX") as listener:
        joining_ = Background(SharedReplayClient, str(path), how())
        with listener.accept() as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes()
            connection.send(Opened(made))
            with pytest.raises(UsageError, match="digest"):
                joining_.result()
    assert not made.exists()


def test_an_agent_joins_no_service_of_another_user(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service_at(path):
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(UsageError, match="replay.sock.key belongs to another user"):
            SharedReplayClient(str(path), how())


def test_a_peer_that_says_nothing_holds_up_nobody(
    path: Path, honest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.collect.shared_replay._ANSWER_S", int(SOON))
    with connected(path), agent_of(path, how("other")) as other:
        fill(other)


def test_an_agent_that_reads_no_answers_holds_up_nobody(
    path: Path, honest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.collect.shared_replay._ANSWER_S", 1)
    deaf = SharedReplayClient(str(path), how("deaf"))
    with contextlib.closing(deaf):
        os.set_blocking(deaf._connection.fileno(), False)
        with pytest.raises(BlockingIOError):  # both directions are full
            while True:
                deaf._connection.send(("fill", None))
        with agent_of(path, how("other")) as other:
            fill(other)


def test_an_agent_that_fails_within_the_service_is_cut_off(path: Path, honest: None) -> None:
    with agent_of(path, how("wrong")) as wrong:
        with pytest.raises(RunError, match="has ended"):
            wrong._ask("insert", 3)


def test_an_agent_that_has_left_is_forgotten_and_its_memory_is_free(path: Path) -> None:
    with service_at(path) as service:
        with agent_of(path, how()):
            assert service.replay._windows
        wait_for(lambda: not service.replay._windows)


# --- endings


def test_a_closed_agent_raises_replay_closed_in_every_call(path: Path) -> None:
    with service_at(path), agent_of(path, how()) as agent:
        agent.close()
        for call in (lambda: insert(agent, Envs(0, T, K), 0), lambda: fill(agent)):
            with pytest.raises(ReplayClosed):
                call()


def test_closing_ends_a_call_that_waits_for_its_answer(path: Path) -> None:
    with service_at(path) as service, agent_of(path, how()) as agent:
        with service.replay._lock:
            call = Background(fill, agent)
            agent.close()
            with pytest.raises(ReplayClosed):
                call.result()


def test_a_service_that_does_not_answer_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.collect.shared_replay._ANSWER_S", 1)
    with service_at(path) as service, agent_of(path, how()) as agent:
        with service.replay._lock, pytest.raises(RunError, match="has not answered for 1 s"):
            fill(agent)
