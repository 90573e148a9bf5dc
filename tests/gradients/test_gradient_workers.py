# SPDX-License-Identifier: Apache-2.0
"""Several gradient workers learn as one learner would, whoever applies their gradients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_running import (
    PPO_LEARNING,
    TIMEOUT_S,
    B,
    BadLoss,
    Learning,
    MeanImpala,
    NoMinibatches,
    NotesCounters,
    T,
    ThreadFleet,
    TwoSteps,
    as_arrays,
    learnt,
    of_catch,
    of_given,
    of_slow,
    rollout,
    running,
)
from later import later

from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import NonFiniteError
from torchbeast.errors import IncompatibleParts, RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.workers import Decentralised, gradient_workers

NOTICED_S = 10.0  # for the others to notice that one has ended
CENTRAL = {"update_execution": "centralised"}
DECENTRAL = {"update_execution": "decentralised"}
FREE = {"communication": "asynchronous"}
# Decentralised in long tests only, because short ones find both bit-equal.
APART = later(DECENTRAL)


def given(workers: int, updates: int, columns: int = B) -> list[list[Rollout]]:
    """Batches by worker; worker i's have i more columns, and a mask."""
    return [
        [masked(rollout(100 * i + k, columns + i), k) for k in range(updates)]
        for i in range(workers)
    ]


def masked(batch: Rollout, seed: int) -> Rollout:
    numbers = torch.Generator().manual_seed(seed)
    valid = torch.rand(batch.reward.shape, generator=numbers) < 0.8
    return dataclasses.replace(batch, valid=valid)


def joined(parts: list[Rollout]) -> Rollout:
    """All columns of several batches in one."""
    fields = [f.name for f in dataclasses.fields(Rollout)]
    found: dict[str, Any] = {name: getattr(parts[0], name) for name in fields}
    for name, value in found.items():
        if isinstance(value, torch.Tensor) and name != "final_observation":
            found[name] = torch.cat([getattr(part, name) for part in parts], 1)
    logits = torch.cat([part.extras["policy_logits"] for part in parts], 1)
    return Rollout(**{**found, "extras": {"policy_logits": logits}})


@pytest.mark.parametrize("kind", [TwoSteps, MeanImpala], ids=["two sums", "mean"])
@pytest.mark.parametrize("how", [CENTRAL, APART], ids=["centralised", "decentralised"])
def test_workers_learn_as_one_learner_from_all_their_batches(how: Any, kind: Any) -> None:
    learning = Learning(kind=kind)
    batches = given(2, 3)
    whole, centre = learning.step(), learning.step()
    with running(partial(of_given, learning=learning, batches=batches), centre, **how) as run:
        workers, _ = run
        metrics = [found for _, found in learnt(workers, 3)]
        workers.state_dict()
        counters = copy.copy(workers.counters)
    for k in range(3):
        halves = [[*parts.split(-(-parts.batch_size // 2))] for parts in (b[k] for b in batches)]
        order = [0, 1] if kind is TwoSteps else [0]
        parts = [[half[n] for half in halves] for n in order] if kind is TwoSteps else None
        expected = update_with(whole, joined([b[k] for b in batches]), parts)
        for name in ("total_loss", "grad_norm", "entropy", "learning_rate"):
            assert metrics[k][name] == pytest.approx(expected[name], rel=1e-3), name
    for name, array in as_arrays(whole).items():
        np.testing.assert_allclose(as_arrays(centre)[name], array, rtol=1e-3, atol=1e-5)
    assert counters == whole.counters


@pytest.mark.parametrize("how", [CENTRAL, DECENTRAL, FREE], ids=["central", "decentral", "free"])
def test_a_layer_that_is_frozen_in_the_learner_keeps_its_values_in_all_workers(how: Any) -> None:
    learning, batches = Learning(), given(2, 9)
    updates = 3 if how is FREE else 1  # two gradients may be older than the change
    centre = learning.step()
    layers = dict(centre.algo.actor.named_children())
    with running(partial(of_given, learning=learning, batches=batches), centre, **how) as run:
        workers, _ = run
        rounds, last = workers.batches(), as_arrays(centre)
        for frozen in ({"policy"}, set(), {"torso", "fc"}):  # before the workers start, and later
            for name, layer in layers.items():
                layer.requires_grad_(name not in frozen)
            for _ in range(updates):
                workers.update(next(rounds))
            workers.state_dict()
            before, last = last, as_arrays(centre)
            moved = {name.split(".")[0] for name in last if (last[name] != before[name]).any()}
            assert moved - {"scale"} == {"torso", "fc", "policy", "baseline"} - frozen


@pytest.mark.parametrize(
    ("how", "count"),
    [(CENTRAL, 2), (DECENTRAL, 2), (FREE, 1)],  # with more, free workers see each other's updates
    ids=["central", "decentral", "free"],
)
def test_a_buffer_that_follows_the_counters_is_the_same_in_the_learner_and_where_workers_act(
    how: Any, count: int
) -> None:
    learning, expected = Learning(kind=NotesCounters), []
    centre = learning.step()
    make = partial(of_given, learning=learning, batches=given(count, 4))
    with running(make, centre, num_workers=count, **how) as (workers, _):
        rounds = workers.batches()
        for _ in range(3):
            counts = workers.counters.state_dict()
            del counts["schedule_starts"]
            expected = [(f"noted_{name}", n) for name, n in counts.items()]
            expected += [("noted_buffer", workers.counters.env_steps)]
            metrics = workers.update(next(rounds)).metrics
            assert set(expected) <= set(metrics.items()), "the mean of all workers"
            workers.state_dict()
            after = [metrics["scheduled"], centre.algo.actor.scheduled.item()]
            assert after == [workers.counters.env_steps] * 2
    assert {("noted_version", 2), ("noted_optimiser_steps", 4)} <= set(expected)
    assert ("noted_steps", 2 * T * sum(range(B, B + count))) in expected


def update_with(whole: Any, batch: Rollout, parts: Any) -> dict[str, float]:
    """Updates a learner by a batch; parts: of each worker in each of its minibatches."""
    if parts is not None:
        whole.algo.minibatches = lambda _: [joined(several) for several in parts]
    found: dict[str, float] = whole.update(batch).metrics
    return found


def test_decentralised_updates_are_bit_equal_to_centralised_ones() -> None:
    """Of PPO, with several minibatches, running statistics and unequal batches."""
    batches = given(3, 2)
    found = []
    for how in (CENTRAL, DECENTRAL):
        centre = PPO_LEARNING.step()
        make = partial(of_given, learning=PPO_LEARNING, batches=batches)
        with running(make, centre, in_processes=True, num_workers=3, **how) as run:
            workers, _ = run
            metrics = [found for _, found in learnt(workers, 2)]
            workers.state_dict()
        found.append((as_arrays(centre), metrics, centre.counters))
    (central, metrics, counters), (apart, other_metrics, other_counters) = found
    assert counters == other_counters and counters.optimiser_steps == 2 * 2 * 3
    assert counters.env_steps == 2 * T * (3 * B + 3)
    for name, array in central.items():
        np.testing.assert_array_equal(apart[name], array, err_msg=name)
    initial = as_arrays(PPO_LEARNING.step())
    assert any((central[name] != initial[name]).any() for name in central)
    assert other_metrics == [pytest.approx(each, rel=1e-6) for each in metrics]


@pytest.mark.parametrize("how", [CENTRAL, DECENTRAL], ids=["centralised", "decentralised"])
def test_a_run_that_is_saved_restored_and_continued_takes_the_identical_next_step(how: Any) -> None:
    learning, batches = Learning(kind=TwoSteps), given(2, 3)
    straight = learning.step()
    with running(partial(of_given, learning=learning, batches=batches), straight, **how) as run:
        workers, _ = run
        rounds = workers.batches()
        for _ in range(2):
            workers.update(next(rounds))
        saved = copy.deepcopy(workers.state_dict())
        workers.update(next(rounds))
        workers.state_dict()
    again, last = learning.step(), [[each[2]] for each in batches]
    again.load_state_dict(saved)
    with running(partial(of_given, learning=learning, batches=last), again, **how) as run:
        workers, _ = run
        learnt(workers, 1)
        workers.state_dict()
    assert again.counters == straight.counters and again.version == 3
    for name, array in as_arrays(straight).items():
        np.testing.assert_array_equal(as_arrays(again)[name], array, err_msg=name)


def test_after_a_synchronous_update_nothing_waits_anywhere() -> None:
    centre, batches = PPO_LEARNING.step(), given(2, 2)
    with running(partial(of_given, learning=PPO_LEARNING, batches=batches), centre) as run:
        workers, fleet = run
        for batch, _ in learnt(workers, 2):
            assert batch.env_steps == T * (2 * B + 1)
        assert workers._gathering._answers.empty()
        assert [lane.qsize() for w in fleet.workers for lane in w.lanes.values()] == [0] * 4
        assert workers.status() == {"collected_steps": 14.0}
        assert workers.seconds() == {"environment": 2.0, "inference": 4.0, "queueing": 6.0}


def test_asynchronous_gradients_are_applied_as_they_come_with_bounded_lag() -> None:
    learning, batches = PPO_LEARNING, given(2, 4)
    centre = learning.step()
    before = as_arrays(centre)
    with running(partial(of_given, learning=learning, batches=batches), centre, **FREE) as run:
        workers, _ = run
        rounds = learnt(workers, 6)
    assert centre.version == 6 and all(len(batch.reports) == 1 for batch, _ in rounds)
    assert centre.counters.env_steps == sum(batch.env_steps for batch, _ in rounds)
    assert any((as_arrays(centre)[name] != array).any() for name, array in before.items())
    for _, metrics in rounds:
        assert 0 <= metrics["gradient_lag"] <= 32
        assert {"total_loss", "mean_lag", "learning_rate"} <= set(metrics)


def test_a_gradient_that_is_too_old_is_dropped_and_counted() -> None:
    """With two workers in turn, each gradient is one step old when it arrives."""
    learning, batches = Learning(kind=TwoSteps), given(2, 8)
    centre = learning.step()
    make = partial(of_given, learning=learning, batches=batches)
    with running(make, centre, max_gradient_lag=0, **FREE) as (workers, _):
        rounds = learnt(workers, 12)
        dropped = workers.status()["dropped_gradients"]
    taken = [metrics["gradient_lag"] for _, metrics in rounds if "gradient_lag" in metrics]
    assert set(taken) <= {0.0}
    assert centre.counters.optimiser_steps <= 2 * 16 - dropped
    assert centre.counters.optimiser_steps > 3, "those of the newest weights are taken"
    assert dropped > 0


def test_stragglers_stop_once_the_others_have_collected_but_not_too_early() -> None:
    learning = Learning(kind=MeanImpala)
    whole = rollout(1)
    for how in (CENTRAL, DECENTRAL):
        centre = learning.step()
        make = partial(of_slow, learning=learning, batch=whole)
        share = {"fraction_workers": 0.5, "fraction_samples": 0.4}
        with running(make, centre, **share, **how) as (workers, _):
            for batch, _ in learnt(workers, 2):
                of_each = [each.env_steps for each in batch.reports]
                assert of_each[0] == T * B and 2 * B <= of_each[1] < T * B
            assert workers.counters.env_steps == workers.counters.learnt_steps
            assert workers.version == 2


def test_a_loss_that_is_not_finite_in_one_worker_changes_the_weights_of_none() -> None:
    bad = rollout(9)
    bad.reward[2, 1] = float("nan")
    for how in (CENTRAL, DECENTRAL, FREE):
        learning = Learning()
        batches = [[rollout(1), rollout(2)], [bad, bad]] if how is not FREE else [[bad], [bad]]
        centre = learning.step()
        before = as_arrays(centre)
        with running(partial(of_given, learning=learning, batches=batches), centre, **how) as run:
            workers, _ = run
            with pytest.raises(NonFiniteError, match="is nan in optimiser step 0"):
                learnt(workers, 1)
            workers.state_dict()
        for name, array in before.items():
            np.testing.assert_array_equal(as_arrays(centre)[name], array, err_msg=name)


@pytest.mark.parametrize("how", [CENTRAL, DECENTRAL, FREE])
def test_an_exception_in_one_worker_ends_the_run_with_its_name_and_cause(how: Any) -> None:
    bad = dataclasses.replace(rollout(1), reward=torch.full((T + 1, B), 1234.0))
    learning = Learning(kind=BadLoss)
    make = partial(of_given, learning=learning, batches=[[rollout(2), rollout(3)], [bad]])
    with (
        running(make, learning.step(), **how) as (workers, _),
        pytest.raises(RunError, match=r"(?s)gradient worker 1: .*no such head"),
    ):
        learnt(workers, 3)


@pytest.mark.parametrize("how", [later(CENTRAL), DECENTRAL])
def test_a_worker_that_dies_ends_the_run_soon_and_is_named(how: Any) -> None:
    learning = Learning()
    make = partial(of_given, learning=learning, batches=given(2, 2))
    with running(make, learning.step(), in_processes=True, **how) as (workers, fleet):
        processes = [worker.process for worker in fleet._workers]
        rounds = workers.batches()
        workers.update(next(rounds))
        processes = [worker.process for worker in fleet._workers]
        batch = next(rounds)
        began = time.monotonic()
        os.kill(processes[0].pid, 9)
        with pytest.raises(RunError, match=r"gradient worker 0: process \d+ was killed by SIGKILL"):
            workers.update(batch)
        assert time.monotonic() - began < NOTICED_S
        assert workers.state_dict()["scheduler_state_dict"]["version"] == 1, "another one has it"
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@pytest.mark.parametrize("how", [CENTRAL, DECENTRAL, FREE])
def test_the_end_of_the_run_ends_every_wait(how: Any) -> None:
    """The workers wait for batches that do not come."""
    learning = Learning()
    make = partial(of_given, learning=learning, batches=given(2, 1))
    supervisor = Supervisor()
    with running(make, learning.step(), **how) as (workers, _):
        workers.start(supervisor)
        taken = threading.Event()

        def learn() -> None:
            for batch in workers.batches():
                taken.set()
                workers.update(batch)

        supervisor.start_thread("learner", learn)
        assert taken.wait(TIMEOUT_S)
        supervisor.stop("a test wants it")
        assert supervisor.join(NOTICED_S) == []
        assert workers.state_dict()["scheduler_state_dict"]["version"] >= 0
    assert supervisor.failure is None


@pytest.mark.parametrize("how", [later(CENTRAL), DECENTRAL, later(FREE)])
def test_after_an_interrupt_wherever_it_comes_the_workers_learn_together_again(how: Any) -> None:
    """The n-th attempt is interrupted after its n-th task, answer or choice of weights."""
    learning, batches = Learning(kind=TwoSteps), given(2, 60)
    straight, centre = learning.step(), learning.step()
    make = partial(of_given, learning=learning, batches=batches)
    with running(make, centre, **how) as (workers, fleet):
        left, seen = [0], []

        def interrupting(call: Any, *arguments: Any) -> Any:
            result = call(*arguments)
            left[0] -= 1
            if left[0] == 0:
                seen.append(call.__name__)
                raise KeyboardInterrupt
            return result

        for of, names in (
            (workers._gathering, ("_start", "_take")),
            (workers, ("_newer_weights",)),
        ):
            for name in names:
                setattr(of, name, partial(interrupting, getattr(of, name)))
        for attempt in [*range(1, 25), -1]:
            left[0] = attempt
            with contextlib.suppress(KeyboardInterrupt):
                batch = next(workers.batches())
                for worker in fleet.workers if how is CENTRAL else []:
                    models = centre.algo.actor, worker._worker._step.algo.actor
                    assert all(map(torch.equal, *(model.parameters() for model in models)))
                workers.update(batch)
        workers.state_dict()
    assert set(seen) == {"_start", "_take", "_newer_weights"}
    if how is DECENTRAL:  # interrupted rounds and updates are completed
        with running(make, straight, **how) as (workers, _):
            learnt(workers, centre.version)
            workers.state_dict()
        for name, array in as_arrays(straight).items():
            np.testing.assert_array_equal(as_arrays(centre)[name], array, err_msg=name)


@pytest.mark.parametrize("how", [CENTRAL, APART, FREE])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_every_arrangement_changes_the_weights_with_little_lag_and_seeds_of_its_own(
    how: Any, algo: str, tmp_path: Path
) -> None:
    centre = of_catch(99, None, None, str(tmp_path), algo).optimiser_step
    before = as_arrays(centre)
    with running(partial(of_catch, folder=str(tmp_path), algo=algo), centre, **how) as run:
        workers, _ = run
        rounds = learnt(workers, 4)
        workers.state_dict()
    assert any((as_arrays(centre)[name] != array).any() for name, array in before.items())
    for number, (batch, metrics) in enumerate(rounds):
        lags = batch.lags(number) if how is not FREE else metrics
        # One free worker may have made all updates before this one.
        assert 0 <= lags["max_lag"] <= (max(2, number) if how is FREE else 2)
    files = list(tmp_path.iterdir())
    seeds = [line for file in files for line in file.read_text().split()]
    assert len(set(seeds)) == len(seeds) == 2 and len(files) in (1, 2)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (0.5, "cpu"), (1, "cuda")])
def test_ranks_meet_where_the_fleet_is_reached_by_nccl_if_each_has_a_gpu(
    gpus: float, device: str
) -> None:
    """nccl refuses ranks that share a GPU."""
    fleet = ThreadFleet()
    fleet.host = "10.0.0.7"
    config = GradientConfig(num_workers=2, gpus=gpus, **DECENTRAL)
    workers = gradient_workers(of_catch, config, Learning().step(), fleet)
    assert isinstance(workers, Decentralised)
    assert workers._meeting() == ("10.0.0.7", workers._store.port, device)


@pytest.mark.parametrize("how", [CENTRAL, FREE, APART])
def test_a_batch_without_minibatches_ends_the_run_as_with_one_learner(how: Any) -> None:
    learning = Learning(kind=NoMinibatches)
    make = partial(of_given, learning=learning, batches=given(2, 2))
    with (
        running(make, learning.step(), **how) as (workers, _),
        pytest.raises(RunError, match=r"minibatches\(\) yielded none"),
    ):
        learnt(workers, 1)


def test_what_does_not_go_together_is_refused_with_both_parts() -> None:
    with pytest.raises(IncompatibleParts, match=r"decentralised.*asynchronous"):
        GradientConfig(num_workers=2, **FREE, **DECENTRAL)
    with pytest.raises(IncompatibleParts, match=r"fraction_workers 0.5.*asynchronous"):
        GradientConfig(num_workers=2, fraction_workers=0.5, **FREE)
    with pytest.raises(ValueError, match="fraction_samples"):
        GradientConfig(num_workers=2, fraction_samples=1.5)


def test_the_state_that_was_copied_is_known_after_the_end_of_the_workers() -> None:
    learning = Learning()
    make = partial(of_given, learning=learning, batches=given(2, 1))
    with running(make, learning.step(), **DECENTRAL) as (workers, _):
        learnt(workers, 1)
        workers.state_dict()
    assert workers.state_dict()["scheduler_state_dict"]["version"] == 1
