# SPDX-License-Identifier: Apache-2.0
"""A replay that agents share on a Ray cluster of this machine: what they read, and how it ends.

All tests are in one class, so that one process starts one cluster for all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from background import SOON, wait_for
from ray_clusters import small_cluster
from true_rows import Batch, Envs, empty_batch, fields

from torchbeast.core.nest_py import flatten
from torchbeast.core.storages.rollout_replay import RolloutReplay
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.schemes.ray_replay import RayReplayClient, joined_on_ray, serving_on_ray
from torchbeast.sources.replay import OwnReplay, Replay, ReplayClosed
from torchbeast.sources.shared_replay import Served
from torchbeast.sources.sharing.joining import Joining, joining_of

ray = pytest.importorskip("ray")

T, B, S, K = 4, 3, 5, 2
SPARE = slice(B, B + S)


def how(name: str, capacity: int = 2000) -> Joining:
    return joining_of(name, fields(T, 1, K), K, capacity, (B, S), seed=7)


def play(envs: Envs, agent: int) -> Batch:
    """A batch of rollouts of B environments of an agent."""
    return envs.batch([envs.next_rollout(agent, index) for index in range(B)])


def insert(replay: Replay, envs: Envs, agent: int, count: int = 20) -> None:
    for _ in range(count):
        replay.insert(play(envs, agent), slice(0, B))


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
    @pytest.mark.parametrize("first_walk", [None, 3])
    def test_a_single_agent_reads_what_its_own_replay_would_give(
        self, cluster: None, first_walk: int | None
    ) -> None:
        envs, truncations = Envs(1, T, K), 0
        own = OwnReplay(RolloutReplay(fields(T, 1, K), 300, K, seed=7))
        with serving_on_ray("alone") as served, joined(served, "a", capacity=300) as agent:
            assert agent.fill(empty_batch(T, B + S, K), SPARE, first_walk) is None
            for _ in range(40):
                batch = play(envs, 0)
                for replay in (own, agent):
                    replay.insert(batch, slice(0, B))
                assert own.facts() == agent.facts()
                assert (own.size, own.episodes) == (agent.size, agent.episodes)
                if not own.episodes:
                    continue
                mine, others = empty_batch(T, B + S, K), empty_batch(T, B + S, K)
                expected = own.fill(mine, SPARE, first_walk)
                found = agent.fill(others, SPARE, first_walk)
                assert expected is not None and found is not None
                assert expected.begins == found.begins
                for one, another in zip(flatten(mine), flatten(others), strict=True):
                    assert one.tobytes() == another.tobytes()
                for one, another in zip(expected.finals, found.finals, strict=True):
                    assert one.tobytes() == another.tobytes() and one.shape == another.shape
                    assert another.flags.writeable
                truncations += len(found.finals[0]) if found.finals else 0
        assert truncations > 10 and own.facts().fill == 1.0

    def test_agents_read_of_each_other_and_are_refused_where_they_differ(
        self, shared: Served
    ) -> None:
        with joined(shared, "a") as a, joined(shared, "b") as b:
            insert(a, Envs(2, T, K), 0)
            batch = empty_batch(T, B + S, K)
            assert b.fill(batch, SPARE, 0) is not None
            assert b.size == 20 * B * T and b.facts().samples_per_insert == S / (20 * B)
            for leaf in flatten(batch):
                assert (np.ascontiguousarray(leaf[:, :B]).view(np.uint8) == 1).all(), "others'"
            with pytest.raises(UsageError, match="has --replay_size 2000, this agent 3000"):
                with joined(shared, "c", capacity=3000):
                    pass
            wrong = play(Envs(3, T, K), 0)
            wrong["observation"]["image"][2] += 1
            with pytest.raises(ValueError, match="is no stack that continues the row before"):
                b.insert(wrong, slice(0, B))
            assert b.fill(batch, SPARE, 0) is not None

    def test_who_joins_again_walks_anew_and_the_older_one_ends(self, shared: Served) -> None:
        supervisor = Supervisor()
        with joined(shared, "d") as old, joined(shared, "e") as other:
            insert(old, Envs(4, T, K, ends=0.02), 1)
            for _ in range(2):
                before = old.fill(empty_batch(T, B + S, K), SPARE, 0)
            assert before is not None and not all(before.begins)
            old.start(supervisor)
            with joined(shared, "d") as new:
                wait_for(lambda: supervisor.ended)
                assert "give each its own --xpid" in str(supervisor.failure)
                with pytest.raises(RunError, match="another run with the same name has joined"):
                    old.fill(empty_batch(T, B + S, K), SPARE, 0)
                again = new.fill(empty_batch(T, B + S, K), SPARE, 0)
                assert again is not None and all(again.begins)
                old.close()
                walked = new.fill(empty_batch(T, B + S, K), SPARE, 0)
                assert walked is not None and not all(walked.begins), "what left was the older one"
            assert other.fill(empty_batch(T, B + S, K), SPARE, 0) is not None
        assert supervisor.join(SOON) == []

    def test_an_agent_that_leaves_is_no_failure(self, shared: Served) -> None:
        supervisor = Supervisor()
        with joined(shared, "f") as agent:
            agent.start(supervisor)
            agent.close()
            assert supervisor.join(SOON) == [] and not supervisor.ended
            with pytest.raises(ReplayClosed):
                insert(agent, Envs(0, T, K), 0)

    def test_a_killed_replay_ends_its_agents_and_is_told_to_who_started_it(
        self, cluster: None
    ) -> None:
        supervisor = Supervisor()
        with serving_on_ray("killed") as served, joined(served, "a") as agent:
            agent.start(supervisor)
            insert(agent, Envs(5, T, K), 0, count=1)
            assert served.failure is None
            os.kill(served.pid, signal.SIGKILL)
            wait_for(lambda: supervisor.ended)
            wait_for(lambda: served.failure is not None)
            said = "the shared replay ray:killed has ended: what was learnt is in the checkpoint"
            assert said in str(supervisor.failure)
            with pytest.raises(RunError, match="has ended: what was learnt is in the checkpoint"):
                insert(agent, Envs(5, T, K), 0)
        assert supervisor.join(SOON) == []

    def test_the_replay_ends_with_its_block_and_a_name_is_free_again(self, cluster: None) -> None:
        for _ in range(2):
            with serving_on_ray("brief") as served:
                with pytest.raises(UsageError, match="ray:brief on this cluster already"):
                    with serving_on_ray("brief"):
                        pass
            assert served.failure is None
        with pytest.raises(UsageError, match="no replay of this name is on the Ray cluster"):
            with joined(served, "a"):
                pass


@pytest.mark.parametrize("address", ["ray:", "ray://10.0.0.1:10001", "ray:a/b"])
def test_an_address_that_names_no_replay_is_told(address: str) -> None:
    with pytest.raises(UsageError, match="takes ray:NAME, with letters"):
        with joined_on_ray(address, how("a")):
            pass


def test_an_address_without_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    with pytest.raises(RunError, match=r"no Ray cluster at \$RAY_ADDRESS localhost:1"):
        with joined_on_ray("ray:a", how("a")):
            pass
