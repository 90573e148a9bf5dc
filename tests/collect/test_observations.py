# SPDX-License-Identifier: Apache-2.0
"""Observations of every rank, dtype and nesting go through both sources and are learnt from.

MonoBeast's half runs without processes, PolyBeast's with a server in a thread of the test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assorted import BARE, NESTS, Assorted, assert_is_right
from compliance.source import Setup, take
from learners import impala
from test_rollout_buffers import Player, columns_of

from torchbeast.core.actors.contract import Actor
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.storages.rollout import Rollout

E = 4
Observe = Callable[[int], Any]
# "every_kind" has the other dtypes and shapes.
PLAYED = NESTS | {name: BARE[name] for name in ("int16_", "int16_2x0x3")}


def environments(observe: Observe, cuts: bool = True) -> SyncVecEnv:
    return SyncVecEnv([lambda: Assorted(observe, cuts)] * E, "Assorted")


@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "uncut"])
@pytest.mark.parametrize("name", PLAYED)
def test_observations_of_any_kind_pass_unchanged_through_monobeasts_shared_memory(
    name: str, cuts: bool
) -> None:
    observe = PLAYED[name]
    player = Player(environments(observe, cuts), model="source_models:CountingNet")
    player.play(0)
    player.play(1)
    rollout = columns_of(player, E + 2, [(0, 0, E), (1, 1, 2)])
    assert bool(rollout.truncated[1:].any()) == cuts
    assert_is_right_in_parts(rollout, observe)


@pytest.mark.parametrize("name", PLAYED)
def test_observations_of_any_kind_pass_unchanged_through_polybeasts_core(name: str) -> None:
    pytest.importorskip("libtorchbeast._C")
    import test_poly_source

    setup = Setup(env_id=f"assorted:{name}", num_envs=E, num_groups=2, batch_size=3)
    with test_poly_source.TestPolySource().running(setup) as running:
        rollouts = take(running, 4)
    assert running.supervisor.failure is None
    assert any(rollout.truncated[1:].any() for rollout in rollouts)
    for rollout in rollouts:
        assert_is_right_in_parts(rollout, PLAYED[name])


@pytest.mark.parametrize("name", PLAYED)
def test_a_server_of_a_single_environment_sends_observations_unchanged(name: str) -> None:
    """The core steps a single environment without SyncVecEnv."""
    pytest.importorskip("libtorchbeast._C")
    import test_poly_source

    observe = PLAYED[name]
    with test_poly_source.playing_with(lambda: Assorted(observe)) as running:
        rollouts = take(running, 4)
    assert running.supervisor.failure is None
    for rollout in rollouts:
        assert_is_right_in_parts(rollout, observe)


def assert_is_right_in_parts(rollout: Rollout, observe: Observe) -> None:
    for size in range(1, rollout.batch_size + 1):
        parts = rollout.split(size)
        assert sum(part.batch_size for part in parts) == rollout.batch_size
        for part in parts:
            assert_is_right(part, observe)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", PLAYED)
def test_observations_of_any_kind_are_acted_on_and_learnt_from_in_slices(name: str) -> None:
    """The gradients of the slices add up to that of the whole batch."""
    observe = PLAYED[name]
    torch.manual_seed(0)
    player = Player(environments(observe), model="auto")
    player.play(0)
    rollout = columns_of(player, E, [(0, 0, E)])
    assert rollout.truncated[1:].any()
    norms = [
        _updated(player.actor, rollout, bytes_at_once=size, num_threads=threads)
        for size, threads in ((None, 1), (1, 1), (1, 2))
    ]
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-3)


def _updated(actor: Actor, rollout: Rollout, **slices: Any) -> float:
    """Returns the gradient norm of one update of a copy."""
    model = copy.deepcopy(actor)
    metrics = impala(model, **slices).update(rollout).metrics
    assert metrics["total_loss"] == metrics["total_loss"]
    return metrics["grad_norm"]
