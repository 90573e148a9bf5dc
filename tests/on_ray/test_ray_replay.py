# SPDX-License-Identifier: Apache-2.0
"""A replay that agents share on a Ray cluster of this machine: what they read, and how it ends.

All tests are in one class, so that one process starts one cluster for all of them.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from background import SOON, Background, wait_for
from later import later
from ray_clusters import small_cluster
from true_rows import Batch, Envs, empty_batch, fields

from torchbeast.collect.replay import JoinRequest, Replay, ReplayClosed
from torchbeast.collect.shared_replay import Served
from torchbeast.core.base.nest import flatten
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.replay.store import row_specs
from torchbeast.errors import RunError, UsageError
from torchbeast.on_ray import replay as ray_replay
from torchbeast.on_ray.replay import (
    RayReplayClient,
    TorchBeastReplay,
    joined_on_ray,
    serving_on_ray,
)

ray = pytest.importorskip("ray")

T, B, S, K = 4, 3, 5, 2
SPARE = slice(B, B + S)


def how(name: str, capacity: int = 2000) -> JoinRequest:
    return JoinRequest(
        name=name,
        row=row_specs(fields(T, 1, K), 1),
        unroll_length=T,
        frame_stack=K,
        replay_size=capacity,
        columns=B,
        spare_columns=S,
        seed=7,
    )


def play(envs: Envs, agent: int) -> Batch:
    """A batch of rollouts of B environments of an agent."""
    return envs.batch([envs.next_rollout(agent, index) for index in range(B)])


def insert(replay: Replay, envs: Envs, agent: int, count: int = 20) -> None:
    for _ in range(count):
        replay.insert(play(envs, agent))


@contextmanager
def joined(served: Served, name: str, capacity: int = 2000) -> Iterator[RayReplayClient]:
    with joined_on_ray(served.address, how(name, capacity)) as client:
        yield client


@pytest.fixture(scope="class")
def cluster() -> Iterator[None]:
    """A Ray to which this process stays connected."""
    with small_cluster() as made:
        ray.init(made.address, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="class")
def shared(cluster: None) -> Iterator[Served]:
    """The replay of those tests that leave it alive."""
    with serving_on_ray("tests, 1") as served:
        yield served


class TestRayReplay:
    @pytest.mark.parametrize("first_walk", [later(None), 3])
    def test_a_single_agent_reads_what_its_own_replay_would_give(
        self, cluster: None, first_walk: int | None
    ) -> None:
        envs, truncations = Envs(1, T, K), 0
        own = RolloutReplay(fields(T, 1, K), 300, K, seed=7)
        with serving_on_ray("alone") as served, joined(served, "a", capacity=300) as agent:
            assert agent.fill(empty_batch(T, B + S, K), SPARE, first_walk) is None
            for _ in range(40):
                batch = play(envs, 0)
                for replay in (own, agent):
                    replay.insert(batch)
                assert own.stats() == agent.stats()
                if not own.stats().episodes:
                    continue
                true, read = empty_batch(T, B + S, K), empty_batch(T, B + S, K)
                expected = own.fill(true, SPARE, first_walk)
                found = agent.fill(read, SPARE, first_walk)
                assert expected is not None and found is not None
                assert expected.begins == found.begins
                for one, another in zip(flatten(true), flatten(read), strict=True):
                    assert one.tobytes() == another.tobytes()
                for one, another in zip(expected.finals, found.finals, strict=True):
                    assert one.tobytes() == another.tobytes() and one.shape == another.shape
                    assert another.flags.writeable
                truncations += len(found.finals[0]) if found.finals else 0
        assert truncations > 10 and own.stats().fill == 1.0

    def test_agents_read_of_each_other_and_are_refused_where_they_differ(
        self, shared: Served
    ) -> None:
        with joined(shared, "a") as a, joined(shared, "b") as b:
            insert(a, Envs(2, T, K), 0)
            batch = empty_batch(T, B + S, K)
            assert b.fill(batch, SPARE, 0) is not None
            stats = b.stats()
            assert stats.size == 20 * B * T and stats.samples_per_insert == S / (20 * B)
            for leaf in flatten(batch):
                assert (np.ascontiguousarray(leaf[:, :B]).view(np.uint8) == 1).all(), "others'"
            with pytest.raises(UsageError, match="2000, this agent 3000"):
                with joined(shared, "c", capacity=3000):
                    pass

    def test_who_joins_again_walks_anew_and_the_older_one_ends(self, shared: Served) -> None:
        with joined(shared, "d") as old, joined(shared, "e") as other:
            insert(old, Envs(4, T, K, ends=0.02), 1)
            for _ in range(2):
                before = old.fill(empty_batch(T, B + S, K), SPARE, 0)
            assert before is not None and not all(before.begins)
            with joined(shared, "d") as new:
                with pytest.raises(RunError, match="another run with the same name has joined"):
                    old.fill(empty_batch(T, B + S, K), SPARE, 0)
                again = new.fill(empty_batch(T, B + S, K), SPARE, 0)
                assert again is not None and all(again.begins)
                old.close()
                walked = new.fill(empty_batch(T, B + S, K), SPARE, 0)
                assert walked is not None and not all(walked.begins), "what left was the older one"
            assert other.fill(empty_batch(T, B + S, K), SPARE, 0) is not None

    def test_an_agent_leaves_with_its_block(self, shared: Served) -> None:
        with joined(shared, "g") as agent:
            agent.fill(empty_batch(T, B + S, K), SPARE, None)
        with pytest.raises(ReplayClosed):
            insert(agent, Envs(0, T, K), 0)
        with pytest.raises(RunError):
            ray.get(agent._actor.fill.remote(agent._ticket, None), timeout=SOON)

    def test_closing_ends_a_call_that_waits_and_one_without_an_answer_fails(
        self, shared: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with joined(shared, "g") as agent:
            agent._actor = Silent(agent._actor)
            waiting = Background(agent.fill, empty_batch(T, B + S, K), SPARE, None)
            wait_for(lambda: agent._actor.calls)
            agent.close()
            with pytest.raises(ReplayClosed):
                waiting.result()
            with pytest.raises(ReplayClosed):
                agent.fill(empty_batch(T, B + S, K), SPARE, None)
            assert agent._actor.calls == 1, "who is closed asks nothing"
        with joined(shared, "g") as agent:
            monkeypatch.setattr(ray_replay, "_ANSWER_S", 0.01)
            agent._actor = Silent(agent._actor)
            waiting = Background(agent._ask, "fill", None)
            with pytest.raises(RunError, match="ray:tests, 1 has not answered for 0.01 s"):
                waiting.result()

    def test_what_ray_says_becomes_a_sentence(self, shared: Served) -> None:
        from ray import exceptions

        of_actor = exceptions.RayTaskError("fill", "lines", exceptions.OutOfDiskError("no"))
        with joined(shared, "h") as agent:
            for error, said in (
                (exceptions.ObjectStoreFullError("no"), "Ray's object store and the disk"),
                (exceptions.OutOfDiskError("no"), "full: use a smaller --batch_size"),
                (of_actor.as_instanceof_cause(), "full: use a smaller --batch_size"),
                (
                    exceptions.ActorUnavailableError("no", None),
                    "has ended; progress is saved in the checkpoint",
                ),
                (ConnectionError("GCS is gone.\nmore"), "ray:tests, 1: GCS is gone$"),
            ):
                failure = agent._failure(error)
                assert isinstance(failure, RunError) and re.search(said, str(failure)), error
                agent._actor = Silent(agent._actor, error)
                with pytest.raises(RunError, match=said):
                    agent.fill(empty_batch(T, B + S, K), SPARE, None)

    @pytest.mark.long
    def test_a_replay_without_room_is_told_and_leaves_its_name_free(
        self, cluster: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ray_replay, "_START_S", 1.0)
            with pytest.raises(RunError, match="within 1 s: it needs 99 free CPUs on one node"):
                with serving_on_ray("large", num_cpus=99):
                    pass
        with serving_on_ray("small", num_cpus=0.25):
            wait_for(lambda: ray.available_resources().get("CPU", 0.0) % 1 == 0.75)
        own = ray.get_runtime_context().get_node_id()
        with serving_on_ray("large", num_cpus=0.0, node=own) as served:
            assert served.failure is None
        with pytest.raises(RunError, match="the shared replay ray:elsewhere: "):
            with serving_on_ray("elsewhere", num_cpus=0.0, node="a" * len(own)):
                pass
        assert ray.is_initialized(), "this process was connected before"

    def test_a_killed_replay_ends_its_agents_and_is_told_to_who_started_it(
        self, cluster: None
    ) -> None:
        with serving_on_ray("killed") as served, joined(served, "a") as agent:
            insert(agent, Envs(5, T, K), 0, count=1)
            assert served.failure is None
            os.kill(served.pid, signal.SIGKILL)
            wait_for(lambda: served.failure is not None)
            with pytest.raises(
                RunError, match="ray:killed has ended; progress is saved in the checkpoint"
            ):
                insert(agent, Envs(5, T, K), 0)
            with pytest.raises((UsageError, RunError), match="no replay of this name|has ended"):
                with joined(served, "b"):
                    pass  # no empty one took its place

    def test_the_replay_ends_with_its_block_and_a_name_is_free_again(self, cluster: None) -> None:
        for _ in range(2):
            with serving_on_ray("brief") as served:
                with pytest.raises(UsageError, match="this cluster already has a replay ray:brief"):
                    with serving_on_ray("brief"):
                        pass
            assert served.failure is None
        with pytest.raises(UsageError, match="Ray cluster of this run has no replay of this name"):
            with joined(served, "a"):
                pass


class Silent:
    """An actor that takes calls and never answers, or raises; but who leaves is heard."""

    def __init__(self, actor: Any, error: Exception | None = None) -> None:
        self.leave, self.error, self.calls = actor.leave, error, 0
        self.fill = SimpleNamespace(remote=self._remote)

    def _remote(self, *_: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(future=concurrent.futures.Future)


def test_calls_of_an_agent_that_was_replaced_fail_and_its_leaving_changes_nothing() -> None:
    replay = TorchBeastReplay()
    (old, _), (other, _), (new, _) = (replay.join(how(name)) for name in "aba")
    assert (old.agent, other.agent, new.agent) == (0, 1, 0) and len({old, other, new}) == 3
    for call in (lambda: replay.insert(old, play(Envs(0, T, K), 0)), lambda: replay.fill(old, 0)):
        with pytest.raises(RunError, match="another run with the same name has joined"):
            call()
    replay.leave(old)
    replay.insert(new, play(Envs(0, T, K), 0))


def test_the_batch_of_an_agent_that_has_left_takes_no_memory() -> None:
    replay = TorchBeastReplay()
    (first, _), (other, _) = replay.join(how("a")), replay.join(how("b"))
    batch = weakref.ref(replay._windows[first]["reward"])
    kept = weakref.ref(replay._windows[other]["reward"])
    replay.leave(first)
    assert batch() is None and kept() is not None


def test_an_address_without_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    with pytest.raises(RunError, match=r"no Ray cluster at \$RAY_ADDRESS localhost:1"):
        with joined_on_ray("ray:a", how("a")):
            pass
