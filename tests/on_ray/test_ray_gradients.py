# SPDX-License-Identifier: Apache-2.0
"""Gradient workers as Ray actors learn as those in processes do, and end as they do."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from background import wait_for
from gradient_running import (
    PPO_LEARNING,
    B,
    BadLoss,
    Learning,
    MeanImpala,
    T,
    as_arrays,
    learnt,
    of_given,
    of_given_that_ends,
    of_slow,
    rollout,
    running,
)
from later import later
from ray_clusters import callers_ray

from torchbeast.errors import RunError
from torchbeast.gradients.workers import WORKER
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.fleet import Actors, RayFleet

pytest.importorskip("ray")

NOTICED_S = 20.0  # for the others to notice that one has ended
DECENTRAL = {"update_execution": "decentralised"}
FREE = {"communication": "asynchronous"}


@pytest.fixture(scope="module", autouse=True)
def initialised() -> Iterator[None]:
    with callers_ray(num_cpus=2):
        yield


def on_ray() -> RayFleet:
    return RayFleet(RayConfig(), "tests", actors=Actors(WORKER, {"num_cpus": 1}))


def test_decentralised_updates_on_ray_are_bit_equal_to_centralised_ones_here() -> None:
    """Of PPO, with several minibatches, running statistics and unequal batches."""
    batches = [[rollout(10 * i + k, B + i) for k in range(2)] for i in range(2)]
    make = partial(of_given, learning=PPO_LEARNING, batches=batches)
    found = []
    for fleet, how in [(None, {}), (on_ray(), DECENTRAL)]:
        centre = PPO_LEARNING.step()
        with running(make, centre, in_processes=True, fleet=fleet, **how) as run:
            workers, _ = run
            learnt(workers, 2)
            workers.state_dict()
        found.append((as_arrays(centre), centre.counters))
    (here, counters), (there, other_counters) = found
    assert counters.optimiser_steps == 2 * 2 * 3 and counters.env_steps == 2 * T * (2 * B + 1)
    initial = as_arrays(PPO_LEARNING.step())
    assert any((here[name] != initial[name]).any() for name in here)
    assert other_counters == counters
    for name, array in here.items():
        np.testing.assert_array_equal(there[name], array, err_msg=name)


@pytest.mark.long
def test_a_straggler_on_ray_stops_while_it_collects() -> None:
    learning = Learning(kind=MeanImpala)
    make = partial(of_slow, learning=learning, batch=rollout(1))
    share = {"fraction_workers": 0.5, "fraction_samples": 0.4}
    with running(make, learning.step(), fleet=on_ray(), **share) as (workers, _):
        ((batch, _),) = learnt(workers, 1)
    of_each = [each.env_steps for each in batch.reports]
    assert of_each[0] == T * B and 2 * B <= of_each[1] < T * B


@pytest.mark.parametrize("how", [DECENTRAL, later(FREE)])
def test_a_worker_that_is_killed_ends_the_run_soon_and_is_named(how: Any) -> None:
    batches = [[rollout(10 * i + k) for k in range(3)] for i in range(2)]
    make = partial(of_given, learning=Learning(), batches=batches)
    with running(make, Learning().step(), fleet=on_ray(), **how) as (workers, _):
        rounds = workers.batches()
        workers.update(next(rounds))
        pids = [workers._places[index].pid for index in range(2)]
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RunError, match=rf"gradient worker 1: process {pids[1]} on .* died"):
            while True:
                workers.update(next(rounds))
        assert time.monotonic() - began < NOTICED_S
    wait_for(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_an_exception_ends_the_run_with_its_origin_and_environments_are_closed(
    tmp_path: Path,
) -> None:
    bad = dataclasses.replace(rollout(1), reward=torch.full((T + 1, B), 1234.0))
    learning = Learning(kind=BadLoss)
    make = partial(
        of_given_that_ends, folder=str(tmp_path), learning=learning, batches=[[rollout(2)], [bad]]
    )
    with (
        running(make, learning.step(), fleet=on_ray()) as (workers, _),
        pytest.raises(RunError, match=r"(?s)gradient worker 1: .*no such head"),
    ):
        learnt(workers, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
