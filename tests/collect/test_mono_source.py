# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's source keeps the contract of sources, and more: its processes may die, a fixed lag
makes every batch the same in every run, and its memory does not grow."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import os
import resource
import signal
import statistics
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from assorted import check_rollout
from background import wait_for
from compliance.source import LATE, Running, Setup, SourceCompliance, copy_of, take
from fleet_running import pids, running_mono, source_of
from learners import impala

from torchbeast.collect.config import ProcessesConfig
from torchbeast.collect.source import WORKER, FleetCollection, FleetSource, local_fleet
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.storages.rollout import Rollout
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.fleet import LocalFleet
from torchbeast.fleets.system import allowed_descriptors
from torchbeast.on_ray.config import RayConfig


class TestMonoSource(SourceCompliance):
    def running(self, setup: Setup) -> AbstractContextManager[Running]:
        return running_mono(setup)


# --- memory

# Of a rollout of one environment with T = 9: per row an observation of one float, reward 4, done,
# truncated, episode_end 1 each, episode_step 4, episode_return 4, action 8, and policy_version,
# env_index, rollout_index 8 each.
ROLLOUT = 10 * (4 + 4 + 3 + 4 + 4 + 8 + 24)


@pytest.mark.parametrize(
    ("settings", "rollouts", "versions"),
    [
        ({}, 2 * 2 + 4, 4),
        ({"batches_at_once": 4}, 5 * 2 + 4, 4),
        ({"spare_columns": 6}, 2 * (2 + 6) + 4, 4),
        ({"num_buffers": 8}, 2 * 2 + 8, 4),
        ({"num_buffers": 7}, 2 * 2 + 6, 4),  # three slots of two rollouts
        ({"num_buffers": 7, "batch_size": 1}, 3 * 1 + 6, 4),  # and one batch ahead
        ({"fixed_lag": 100}, 2 * 2 + 4, 102),
    ],
)
def test_every_buffer_and_every_version_of_the_weights_counts_as_memory(
    settings: dict[str, Any], rollouts: int, versions: int
) -> None:
    given = {"num_buffers": 4, "batch_size": 2, **settings}
    small = Setup(env_id="source_envs:Counting", model="mlp", extras=(), unroll_length=9)
    setup = dataclasses.replace(small, batch_size=given.pop("batch_size"))
    source = source_of(setup, LocalFleet(WORKER, {}), **given)
    state = source._learner.rollouts.agent.model.state_dict()
    own = sum(-(-tensor.nbytes // 64) * 64 for tensor in state.values())
    assert source.num_bytes == rollouts * ROLLOUT + versions * own


# --- processes that die

NUMBERED = Setup(
    env_id="source_envs:Numbered", num_envs=4, num_groups=2, batch_size=2, unroll_length=40
)
# An environment's number -> its rollouts, [T+1, 5] each: what it shows, env_index, rollout_index.
Columns = dict[int, list[torch.Tensor]]


@dataclass(frozen=True)
class Survived:
    """Rollouts of a run in which one actor process was killed and replaced."""

    before: list[int]  # numbers of the environments
    after: list[int]  # of those that came with the successor
    columns: Columns
    status: dict[str, int]


@pytest.fixture(scope="module")
def survived() -> Survived:
    """Each actor has one slot: if that of the dead process were lost, nothing would be written."""
    columns: Columns = {}
    with running_mono(NUMBERED, num_buffers=4) as running:
        batches = map(copy_of, running.source.batches())
        collect(batches, columns, num_envs=4)
        before = list(columns)
        os.kill(pids(running)[1], signal.SIGKILL)
        collect(batches, columns, num_envs=6)
        status = running.source.status()
        assert psutil.pid_exists(pids(running)[1])
    assert running.supervisor.failure is None
    after = [number for number in columns if number not in before]
    return Survived(before, after, columns, status)


def collect(batches: itertools.chain[Rollout], columns: Columns, num_envs: int) -> None:
    """Takes batches until there are three rollouts of that many environments."""
    deadline = time.monotonic() + LATE
    while sum(len(rollouts) >= 3 for rollouts in columns.values()) < num_envs:
        assert time.monotonic() < deadline, {n: len(found) for n, found in columns.items()}
        rollout = next(batches)
        check_rollout(rollout)
        numbers = rollout.env_index, rollout.rollout_index
        rows = torch.cat([rollout.observation, torch.stack(numbers, -1)], -1)
        for column in rows.unbind(1):
            columns.setdefault(int(column[0, 0]), []).append(column)


def test_a_killed_actor_is_replaced_and_its_slot_is_written_again(survived: Survived) -> None:
    assert len(survived.before) == 4 and len(survived.after) == 2
    assert survived.status["replaced_workers"] == 1
    assert survived.status["live_workers"] == 2


def test_no_rollout_is_torn_by_the_death_of_its_actor(survived: Survived) -> None:
    for number, rollouts in survived.columns.items():
        for index, rollout in enumerate(rollouts):
            assert rollout[:, 0].eq(number).all()
            start = NUMBERED.unroll_length * index
            assert rollout[:, 1].tolist() == list(range(start, start + len(rollout)))


def test_a_successor_keeps_the_numbers_of_environments_and_skips_a_rollout(
    survived: Survived,
) -> None:
    numbers = {
        number: (int(rollouts[0][0, 3]), [int(rollout[0, 4]) for rollout in rollouts])
        for number, rollouts in survived.columns.items()
    }
    for number in survived.before:
        indices = numbers[number][1]
        assert indices == list(range(len(indices)))
    before = {numbers[number][0]: number for number in survived.before}
    assert sorted(before) == [0, 1, 2, 3]
    for number in survived.after:
        env_index, indices = numbers[number]
        assert indices[0] > numbers[before[env_index]][1][-1] + 1, "nothing goes on over the gap"
        assert indices == list(range(indices[0], indices[0] + len(indices)))


def test_no_two_environments_share_random_actions(survived: Survived) -> None:
    """With a uniform policy, columns, processes, and a process and its successor differ only by
    their random numbers.
    """
    actions = {tuple(rollouts[0][1:, 2].tolist()) for rollouts in survived.columns.values()}
    assert len(actions) == 6
    for first, second in itertools.combinations(actions, 2):
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert same < NUMBERED.unroll_length * 0.6, "a quarter is expected"


def test_an_actor_that_dies_before_any_rollout_fails_the_run() -> None:
    with running_mono(Setup(env_id="source_envs:Crashes")) as running:
        assert take(running, 0) == list(running.source.batches())
        wait_for(lambda: running.supervisor.ended, LATE)
    assert running.source.status()["replaced_workers"] == 0
    failure = running.supervisor.failure
    assert failure is not None and isinstance(failure.error, ProcessDied)
    assert failure.origin == "worker 0"
    assert "exited with code 3" in str(failure) and "out of memory in the emulator" in str(failure)


def test_an_actor_that_dies_after_another_has_worked_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pid"
    monkeypatch.setenv("MARKER", str(marker))
    setup = dataclasses.replace(NUMBERED, env_id="source_envs:FirstHangs")
    with running_mono(setup) as running:
        next(iter(running.source.batches()))  # written by the other: a batch is one actor's
        wait_for(lambda: marker.exists() and marker.read_text(), LATE)
        os.kill(int(marker.read_text()), signal.SIGKILL)
        wait_for(lambda: running.source.status()["replaced_workers"] == 1, LATE)
    assert running.supervisor.failure is None


def test_an_environment_that_cannot_be_made_is_named() -> None:
    setup = Setup(env_id="source_envs:CannotBeMade", described_as="source_envs:Numbered")
    with running_mono(setup) as running:
        assert list(running.source.batches()) == []
    assert "source_envs:CannotBeMade cannot be made" in str(running.supervisor.failure)


# --- a fixed lag

CATCH = Setup(env_id="Catch", model="mlp", use_lstm=True, num_envs=4, batch_size=4)


@dataclass(frozen=True)
class UpdateResult:
    """The result of learning from a source."""

    losses: list[float]
    batches: list[str]  # a digest of every byte
    versions: list[set[int]]  # of the weights that acted in rows 1..T


def learn(
    num_updates: int, fixed_lag: int, num_workers: int, num_buffers: int, batch_size: int = 4
) -> UpdateResult:
    setup = dataclasses.replace(CATCH, num_groups=num_workers, batch_size=batch_size)
    learnt = UpdateResult([], [], [])
    with running_mono(setup, num_buffers=num_buffers, fixed_lag=fixed_lag) as running:
        step = impala(running.agent.model, entropy_cost=0.01)
        step.counters.version = setup.version
        for rollout in itertools.islice(running.source.batches(), num_updates):
            learnt.batches.append(digest(rollout))
            learnt.versions.append(set(rollout.policy_version[1:].flatten().tolist()))
            learnt.losses.append(step.update(copy_of(rollout)).metrics["total_loss"])
            running.weights.publish(running.agent.model, step.version)
    assert running.supervisor.failure is None
    return learnt


def digest(rollout: Rollout) -> str:
    found = hashlib.sha256()
    rollout.map(lambda leaf: found.update(leaf.contiguous().numpy().tobytes()))
    return found.hexdigest()


@pytest.mark.long
def test_one_synchronous_actor_gives_the_same_50_updates_bit_for_bit() -> None:
    first, again = (learn(50, fixed_lag=0, num_workers=1, num_buffers=4) for _ in range(2))
    assert len(first.losses) == 50 and len(set(first.losses)) > 40
    assert first == again
    assert first.versions == [{CATCH.version + update} for update in range(50)]


def on_demand(num_updates: int, num_buffers: int, batch_size: int = CATCH.num_envs) -> UpdateResult:
    """Batches with three versions published after each."""
    setup = dataclasses.replace(CATCH, num_groups=2, batch_size=batch_size)
    learnt, version = UpdateResult([], [], []), setup.version
    options = {"fixed_lag": 0, "num_buffers": num_buffers, "on_demand": True}
    with running_mono(setup, **options) as running:
        for update, rollout in enumerate(itertools.islice(running.source.batches(), num_updates)):
            learnt.batches.append(digest(rollout))
            learnt.versions.append(set(rollout.policy_version[1:].flatten().tolist()))
            numbers = range(update * batch_size, (update + 1) * batch_size)
            in_turn = [number % setup.num_envs for number in numbers]
            assert rollout.env_index[0].tolist() == in_turn
            for _ in range(3):
                version += 1
                running.weights.publish(running.agent.model, version)
    assert running.supervisor.failure is None
    return learnt


def test_on_demand_a_batch_is_collected_with_the_weights_of_when_it_is_asked_for() -> None:
    few, many = (on_demand(12, n * CATCH.num_envs) for n in (1, 3))
    assert few.versions == [{CATCH.version + 3 * update} for update in range(12)]
    assert few == many, "spare slots change nothing"


def test_a_batch_that_was_asked_for_in_vain_is_the_next_one() -> None:
    setup = dataclasses.replace(CATCH, num_groups=2, batch_size=CATCH.num_envs)
    with running_mono(setup, fixed_lag=0, on_demand=True) as running:
        running.source._pacing.request()  # by an iterator that was interrupted while it waited
        for index, rollout in enumerate(itertools.islice(running.source.batches(), 3)):
            assert rollout.rollout_index.eq(index).all()
            assert rollout.policy_version[1:].eq(setup.version + index).all()
            running.weights.publish(running.agent.model, setup.version + index + 1)


def test_ctrl_c_ends_no_event_halfway() -> None:
    source, ran = source_of(CATCH, LocalFleet(WORKER, {})), []

    def event() -> None:
        signal.raise_signal(signal.SIGINT)
        ran.append(True)

    with pytest.raises(KeyboardInterrupt):
        source._dispatcher.do(event)
    assert ran == [True]


@pytest.mark.parametrize("batch_size", [CATCH.num_envs // 2, 2 * CATCH.num_envs])
def test_rollouts_on_demand_may_be_of_some_environments_or_several_of_each(batch_size: int) -> None:
    found = on_demand(6, CATCH.num_envs, batch_size).versions
    assert found == [{CATCH.version + 3 * update} for update in range(6)]


def test_an_actor_reads_observations_as_the_learners_network_does() -> None:
    """Without ranges of values a network has no statistics, and its weights differ in size."""
    pytest.importorskip("gymnasium")
    setup = Setup(env_id="CartPole-v1", model="mlp", reads_values=False)
    with running_mono(setup, fixed_lag=0) as running:
        assert "scale.mean" not in running.agent.model.state_dict()
        rollout = next(iter(running.source.batches()))
        output = unroll(running.agent.model, rollout)
        torch.testing.assert_close(output.policy_logits[:-1], rollout.extras["policy_logits"][1:])


@pytest.mark.long
def test_a_fixed_lag_gives_the_same_batches_with_any_number_of_slots() -> None:
    """A batch holds one process's rollout, so learning starts before the other has begun."""
    few, many = (learn(25, 2, num_workers=2, num_buffers=n, batch_size=2) for n in (4, 18))
    assert few == many
    updates = range(CATCH.version, CATCH.version + 25)
    assert few.versions == [{max(CATCH.version, update - 2)} for update in updates]


def test_every_environment_needs_a_buffer() -> None:
    with pytest.raises(
        ValueError, match="4 environments need as many buffers, but num_buffers is 3"
    ):
        ProcessesConfig(num_envs=4, num_buffers=3)


@pytest.mark.parametrize("given", [{"num_buffers": 2}, {"num_envs": 2}])
def test_more_processes_than_environments_are_refused(given: dict[str, int]) -> None:
    for config in (ProcessesConfig, RayConfig):
        with pytest.raises(ValueError, match="is 4, .*use at most num_workers 2, or set num_envs"):
            config(num_workers=4, **given)


# --- buffers


@pytest.mark.parametrize(
    ("num_envs", "num_workers", "num_buffers", "batch_size", "slots", "ahead"),
    [
        (45, 2, 60, 4, 1, 3),  # the original's command: 15 rollouts may wait
        (45, 16, 60, 4, 1, 3),  # on any machine
        (4, 2, 8, 8, 2, 0),  # the default
        (1, 1, 1, 8, 1, 0),
        (2, 2, 7, 2, 3, 0),
    ],
)
def test_num_buffers_counts_rollouts_of_one_environment(
    num_envs: int, num_workers: int, num_buffers: int, batch_size: int, slots: int, ahead: int
) -> None:
    made = ProcessesConfig(num_envs=num_envs, num_workers=num_workers, num_buffers=num_buffers)
    assert (made.slots_per_process(), made.batches_ahead(batch_size)) == (slots, ahead)
    assert num_envs <= slots * num_envs + ahead * batch_size <= num_buffers


def nothing_moves(source: FleetSource, full_batches: int) -> bool:
    """All batches but the learner's are full, and both actors wait for room: what they were granted
    is written and reported. An actor whose report is still on its way would be learnt after
    rollouts that are newer.
    """
    status = source.status()
    return status["learner_queue_size"] >= full_batches * 4 and status["waiting_workers"] == 2


def test_a_slow_learner_of_the_originals_command_learns_from_data_as_old_as_the_original() -> None:
    """With 60 buffers, 45 of them written at a time, and batches of 4 the original's rollouts are
    at most 60 / 4 = 15 updates old when they leave the buffers, and those of 45 actors who begin
    together are learnt over 45 / 4 updates. Two batches more: one is learnt, one is prepared.
    """
    setup = dataclasses.replace(
        NUMBERED, env_id="Catch", num_envs=45, num_groups=2, batch_size=4, unroll_length=3
    )
    lags: list[int] = []
    with running_mono(setup, num_buffers=60) as running:
        version, batches = running.weights.version, running.source.batches()
        for _ in range(60):
            wait_for(lambda: nothing_moves(running.source, full_batches=4), LATE)
            lags.append(version - int(next(batches).policy_version[1:].min()))
            version += 1
            running.weights.publish(running.agent.model, version)
    assert running.supervisor.failure is None
    settled = lags[20:]
    assert len(settled) == 40 and max(settled) <= 60 / 4 + 2
    assert statistics.fmean(settled) >= 45 / 4 / 2, "a process's rollouts come all at once"


# --- memory

MEGABYTE = 2**20


def test_memory_is_flat_with_one_actor_and_two_buffers() -> None:
    """A rollout has 0.6 MB; after the warm-up less than a tenth of 150 of them may remain."""
    setup = Setup(env_id="source_envs:Big", num_envs=1, batch_size=1, unroll_length=20)
    with running_mono(setup, num_buffers=2) as running:
        processes = [psutil.Process(), psutil.Process(pids(running)[0])]
        batches = running.source.batches()
        places = {next(batches).observation.data_ptr() for _ in range(50)}
        before = [process.memory_info().rss for process in processes]
        places |= {next(batches).observation.data_ptr() for _ in range(150)}
        after = [process.memory_info().rss for process in processes]
    assert running.supervisor.failure is None
    assert len(places) == 2, "batches are used again"
    for then, now in zip(before, after, strict=True):
        assert now - then < 10 * MEGABYTE


def test_a_source_that_was_deleted_leaves_no_open_file() -> None:
    def open_files() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests left
    before = open_files()
    with running_mono(CATCH):
        assert open_files() > before
    gc.collect()
    assert open_files() <= before


def test_the_files_of_many_workers_may_be_open_until_the_fleet_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is a worker for each core by default, and the limit is often 1,024."""
    monkeypatch.setattr("torchbeast.collect.source.FleetSource", lambda *_: allowed_descriptors())
    actors, nothing = ProcessesConfig(num_envs=256, num_workers=256), None
    plan: Any = FleetCollection(
        num_envs=256, processes=256, fixed_lag=None, actors=actors, make_fleet=local_fleet
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        with ExitStack() as ending:
            assert plan.source(nothing, nothing, ending) >= 6 * 256
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
