# SPDX-License-Identifier: Apache-2.0
"""RayBeast's source on a cluster of this machine keeps the contract of sources, and more: workers
may be killed, nodes may leave and join.

All tests are in one class, so that one process starts one cluster for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from background import wait_for
from compliance.source import LATE, Running, Setup, SourceCompliance, copy_of
from fleet_running import running_on
from ray_clusters import small_cluster
from ray_running import Pool
from transitions_running import check_contract, counting

from torchbeast.core.storages.rollout import Rollout
from torchbeast.fleets.fleet import WorkerLost
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.fleet import RayFleet, RayWorker

ray = pytest.importorskip("ray")

NUMBERED = Setup(env_id="source_envs:Numbered", num_envs=2, num_groups=2, batch_size=1)
# Ray waits half a minute for a node that does not answer, by default.
IMPATIENT = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="class")
def cluster() -> Iterator[Any]:
    """A head with two CPUs, on which this process is."""
    with small_cluster(_system_config=IMPATIENT) as made:
        yield made


@pytest.fixture(scope="class")
def fleet(cluster: Any) -> Iterator[RayFleet]:
    with RayFleet(RayConfig(address=cluster.address), "tests") as made:
        yield made


class TestRaySource(SourceCompliance):
    pool: Pool

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def pooled(cls, fleet: RayFleet) -> None:
        cls.pool = Pool(fleet)

    @contextmanager
    def running(self, setup: Setup) -> Iterator[Running]:
        with self.pool.loan(), running_on(self.pool, setup) as running:
            yield running

    @pytest.mark.long
    def test_its_rollouts_go_through_a_replay_of_transitions_unchanged(self) -> None:
        check_contract(lambda setup: counting(self.running(setup), setup))

    # --- weights

    def test_workers_out_of_reach_of_the_learners_memory_act_with_what_they_are_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in the tests of every source, where these workers read weights by themselves."""
        monkeypatch.setattr(Pool, "own_node", "")
        self.test_rows_have_the_version_that_acted_and_it_never_decreases()

    @pytest.mark.long
    def test_with_a_lag_of_0_every_batch_is_played_with_the_newest_weights(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By a worker that reads them, and by one that is sent them."""
        setup = dataclasses.replace(NUMBERED, batch_size=2)
        for reads in (True, False):
            if not reads:
                monkeypatch.setattr(Pool, "own_node", "")
            options = {"fixed_lag": 0, "num_buffers": 2}
            with self.pool.loan(), running_on(self.pool, setup, **options) as running:
                batches = running.source.batches()
                for version in range(setup.version, setup.version + 5):
                    rollout = next(batches)
                    assert rollout.policy_version[1:].eq(version).all()
                    assert rollout.env_index[0].tolist() == [0, 1]
                    running.weights.publish(running.agent.model, version + 1)
            assert running.supervisor.failure is None

    # --- workers that die, nodes that leave and join

    def test_a_killed_worker_is_replaced_and_begins_new_episodes(self) -> None:
        """Its environments keep their index; the numbers of their rollouts have a gap."""
        with self.running(NUMBERED) as running:
            batches = map(copy_of, running.source.batches())
            before = collect(batches, lambda seen: len(settled(seen)) == 2)
            self.pool.forget(1)
            os.kill(running.source._actors[1].place.pid, signal.SIGKILL)
            after = collect(batches, lambda seen: bool(settled(seen) - set(before)))
            status = running.source.status()
        assert running.supervisor.failure is None
        assert status["replaced_workers"] == 1 and status["live_workers"] == 2
        (gone,) = (number for number in before if before[number][0].env_index == 1)
        (survivor,) = set(before) - {gone}
        (born,) = set(after) - set(before)
        last = [*before[gone], *after.get(gone, [])][-1]
        assert after[born][0].env_index == 1 and after[born][0].start == 0
        assert after[born][0].rollout_index > last.rollout_index + 1, "nothing goes on over the gap"
        assert contiguous([*before[survivor], *after[survivor]])

    def test_an_environment_that_kills_its_worker_fails_the_run_before_any_has_worked(self) -> None:
        with self.running(Setup(env_id="source_envs:Crashes")) as running:
            self.pool.forget(0)
            assert list(running.source.batches()) == []
            wait_for(lambda: running.supervisor.ended, LATE)
        failure = running.supervisor.failure
        assert failure is not None and isinstance(failure.error, WorkerLost)
        assert failure.origin == "worker 0" and running.source.status()["replaced_workers"] == 0
        assert "died; last output:" in str(failure)
        assert "out of memory in the emulator" in str(failure), failure

    @pytest.mark.long
    def test_a_node_that_leaves_before_its_worker_is_there_is_not_the_workers_fault(
        self, cluster: Any, fleet: RayFleet, tmp_path: Path
    ) -> None:
        self.pool.clear()
        with asked(fleet, ["on the head", "there too"]) as workers:
            for worker in workers:
                place_of(worker)
            node = cluster.add_node(num_cpus=1)
            with asked(fleet, [NeverMade(tmp_path / "begun")]) as (worker,):
                answers = asked_for_its_place(worker)
                wait_for((tmp_path / "begun").exists, LATE)
                cluster.remove_node(node, allow_graceful=False)
                lost = fleet.explain(answers.get(timeout=LATE), None)
        assert lost.has_left and str(lost) == "its node has left the cluster"

    @pytest.mark.long
    def test_a_node_that_leaves_with_its_worker_is_not_the_workers_fault(
        self, cluster: Any, fleet: RayFleet
    ) -> None:
        """Ray still counts on the node when it says that the worker is out of reach."""
        self.pool.clear()
        node = cluster.add_node(num_cpus=1)
        with asked(fleet, ["one", "two", "three"]) as workers:
            places = [place_of(worker) for worker in workers]
            (there,) = (i for i, place in enumerate(places) if place.node == node.node_id)
            cluster.remove_node(node, allow_graceful=False)
            with contextlib.suppress(ProcessLookupError):  # it ends itself without its node
                os.kill(places[there].pid, signal.SIGKILL)
            lost = fleet.explain(place_of(workers[there]), places[there])
        assert lost.has_left and str(lost).startswith(f"its node {places[there].host} ")

    @pytest.mark.long
    def test_a_run_goes_on_without_a_node_that_leaves_and_uses_one_that_joins(
        self, cluster: Any
    ) -> None:
        self.pool.clear()  # room for workers whose node is decided by Ray
        second = cluster.add_node(num_cpus=1)
        setup = dataclasses.replace(NUMBERED, num_envs=3, num_groups=3)
        with self.running(setup) as running:
            batches = map(copy_of, running.source.batches())
            before = collect(batches, lambda seen: len(settled(seen)) == 3)
            hosts = [actor.place.node for actor in running.source._actors]
            (moved,) = (i for i, host in enumerate(hosts) if host == second.node_id)
            reads = [actor.reads_weights for actor in running.source._actors]
            assert reads == [host != second.node_id for host in hosts], "those of other nodes"
            cluster.remove_node(second, allow_graceful=False)
            wait_for(lambda: running.source.status()["replaced_workers"] == 1, LATE)
            without = collect(batches, lambda seen: len(settled(seen)) == 2)
            assert running.source.status()["pending_workers"] == 1
            third = cluster.add_node(num_cpus=1)
            after = collect(batches, lambda seen: bool(set(seen) - set(before)))
            assert running.source._actors[moved].place.node == third.node_id
        self.pool.clear()
        assert running.supervisor.failure is None
        (born,) = set(after) - set(before)
        assert after[born][0].env_index == moved and born not in without

    def test_killed_workers_are_forgotten(self, fleet: RayFleet) -> None:
        before = len(fleet._workers)
        worker = fleet.worker("to be forgotten")
        assert len(fleet._workers) == before + 1
        worker.kill()
        worker.kill()
        assert len(fleet._workers) == before


class NeverMade(str):
    """A worker's name, the path of a file. An actor that is given it makes that file, and hangs."""

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self)!r}, 'w').close() or __import__('time').sleep({10 * LATE})",)


@contextmanager
def asked(fleet: RayFleet, names: list[str]) -> Iterator[list[RayWorker]]:
    """Asks for workers, and ends them."""
    workers = [fleet.worker(name) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def asked_for_its_place(worker: RayWorker) -> queue.SimpleQueue[Any]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    worker.call(answers.put, "place")
    return answers


def place_of(worker: RayWorker) -> Any:
    return asked_for_its_place(worker).get(timeout=LATE)


class Column(NamedTuple):
    """One rollout of one environment."""

    env_index: int
    rollout_index: int
    start: int  # steps of the environment before it


Seen = dict[int, list[Column]]  # by an environment's own number


def collect(batches: Iterator[Rollout], until: Callable[[Seen], bool]) -> Seen:
    """Takes batches of one rollout until the condition holds."""
    seen: Seen = {}
    deadline = time.monotonic() + LATE
    while not until(seen):
        assert time.monotonic() < deadline, seen
        rollout = next(batches)
        number, start = rollout.observation[0, 0, :2].tolist()
        where = int(rollout.env_index[0, 0]), int(rollout.rollout_index[0, 0])
        seen.setdefault(number, []).append(Column(*where, start))
    return seen


def settled(seen: Seen) -> set[int]:
    """The environments of which there are three rollouts."""
    return {number for number, columns in seen.items() if len(columns) >= 3}


def contiguous(columns: list[Column]) -> bool:
    indices = [column.rollout_index for column in columns]
    return indices == list(range(indices[0], indices[0] + len(indices)))
