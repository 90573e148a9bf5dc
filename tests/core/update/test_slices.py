# SPDX-License-Identifier: Apache-2.0
"""A batch is learnt in slices, by several threads; what is learnt is the same."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import impala

from torchbeast.core.actors.contract import ModelInputs, ModelOutput
from torchbeast.core.actors.networks import AtariNet, DeepNet, MLPNet
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.base.computing import computing_in
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.losses import Mean
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.minibatch import Slices, least_columns
from torchbeast.core.update.optimiser_step import OptimiserStep

T, ACTIONS = 5, 3
COLUMN = (T + 1) * 4 * 4  # bytes: observations of four floats
ENDS = {"terminated": [(2, 0), (3, 2)], "truncated": [(3, 0), (0, 1), (4, 2)]}
TIMEOUT_S = 30.0
Make = Callable[..., Rollout]


class Recording(IMPALA):
    """Remembers how many columns each backward had."""

    def losses(self, minibatch: Rollout) -> Losses:
        self.__dict__.setdefault("seen", []).append(minibatch.batch_size)
        return super().losses(minibatch)


class Means(Recording):
    """A variant whose terms are means over the steps."""

    reduction = "mean"


def mlp(use_lstm: bool = False) -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), use_lstm)


def assert_learns_the_same(
    some: OptimiserStep[Rollout], whole: OptimiserStep[Rollout], rollout: Rollout
) -> None:
    """To the accuracy of float32: sums are added up in another order."""
    assert some.update(rollout).metrics == pytest.approx(
        whole.update(rollout).metrics, rel=1e-4, abs=1e-6
    )
    for name, parameter in whole.algo.actor.named_parameters():
        found = some.algo.actor.get_parameter(name)
        torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(
        some.algo.actor.state_dict(), whole.algo.actor.state_dict(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("kind", [Recording, Means], ids=["sum", "mean"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("columns", "seen"), [(0, [1] * 5), (2, [1, 2, 2])])
def test_an_update_some_columns_at_a_time_is_the_update_of_all(
    make_rollout: Make,
    use_lstm: bool,
    kind: type[IMPALA],
    num_threads: int,
    columns: int,
    seen: list[int],
) -> None:
    model = mlp(use_lstm)
    whole = impala(copy.deepcopy(model), kind)
    cut = {"bytes_at_once": columns * COLUMN, "num_threads": num_threads}
    parts: Any = impala(model, kind, **cut)
    state = map_leaves(torch.randn_like, model.initial_state(5))
    assert_learns_the_same(parts, whole, make_rollout(T, 5, **ENDS, state=state))
    assert sorted(parts.algo.seen) == seen


class OfSome(Recording):
    """Has a metric of those columns alone whose first reward is above 1."""

    def losses(self, minibatch: Rollout) -> Losses:
        losses = super().losses(minibatch)
        chosen = minibatch.reward[1][minibatch.reward[1] > 1]
        if not len(chosen):
            return losses
        found = Mean(chosen.sum(), torch.tensor(len(chosen)))
        return losses._replace(metrics={**losses.metrics, "chosen": found})


@pytest.mark.parametrize("column", range(5))
def test_a_metric_that_only_some_slices_have_is_the_mean_over_these(
    make_rollout: Make, column: int
) -> None:
    rollout = make_rollout(T, 5)
    rollout.reward[1] = 0.0
    rollout.reward[1, column] = 3.0
    rollout.reward[1, 4] = 5.0
    parts = impala(mlp(), OfSome, bytes_at_once=COLUMN, num_threads=1)
    assert parts.update(rollout).metrics["chosen"] == (4.0 if column < 4 else 5.0)


class Meeting(IMPALA):
    """Every backward waits until as many threads are in one."""

    def meet(self, num_threads: int) -> None:
        self.barrier = threading.Barrier(num_threads, timeout=TIMEOUT_S)
        self.threads: set[str] = set()

    def losses(self, minibatch: Rollout) -> Losses:
        self.threads.add(threading.current_thread().name)
        self.barrier.wait()
        return super().losses(minibatch)


def test_several_threads_learn_at_the_same_time_and_the_caller_is_one(make_rollout: Make) -> None:
    model = mlp()
    whole = impala(copy.deepcopy(model))
    parts: Any = impala(model, Meeting, bytes_at_once=2 * COLUMN, num_threads=3)
    parts.algo.meet(3)
    assert_learns_the_same(parts, whole, make_rollout(T, 6))
    assert len(parts.algo.threads) == 3
    assert threading.current_thread().name in parts.algo.threads


class FailsBesides(Meeting):
    """The thread that did not ask fails, or the one that did; once."""

    asking_fails = False
    has_failed = False

    def losses(self, minibatch: Rollout) -> Losses:
        losses = super().losses(minibatch)
        is_asking = threading.current_thread() is threading.main_thread()
        if is_asking == self.asking_fails and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("a slice went wrong")
        return losses


@pytest.mark.parametrize("asking_fails", [False, True])
def test_an_error_of_any_thread_is_raised_and_the_next_update_works(
    make_rollout: Make, asking_fails: bool
) -> None:
    parts: Any = impala(mlp(), FailsBesides, bytes_at_once=3 * COLUMN, num_threads=2)
    parts.algo.meet(2)
    parts.algo.asking_fails = asking_fails
    before = copy.deepcopy(parts.algo.actor.state_dict())
    with pytest.raises(RuntimeError, match="a slice went wrong"):
        parts.update(make_rollout(T, 6))
    torch.testing.assert_close(parts.algo.actor.state_dict(), before, rtol=0, atol=0)
    whole = impala(copy.deepcopy(parts.algo.actor))
    assert_learns_the_same(parts, whole, make_rollout(T, 6))


class ComputesInBfloat16(MLPNet):
    """Its linear layers do, as features of images do."""

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        with computing_in(torch.bfloat16, inputs.reward.device):
            return super().forward(inputs, core_state)


def test_threads_in_bfloat16_lose_no_gradient_to_those_that_record_none(make_rollout: Make) -> None:
    """Values of truncated episodes are computed without a graph, while others record theirs."""
    model = ComputesInBfloat16(ArraySpec((4,), "float32"), Discrete(ACTIONS), False)
    whole = impala(copy.deepcopy(model))
    parts = impala(model, bytes_at_once=COLUMN, num_threads=3)
    rollout = make_rollout(
        T, 24, truncated=[(row, column) for row in (2, 4) for column in range(24)]
    )
    expected = whole.update(rollout).metrics["grad_norm"]
    assert parts.update(rollout).metrics["grad_norm"] == pytest.approx(expected, rel=0.02)
    for name, parameter in whole.algo.actor.named_parameters():
        found = model.get_parameter(name)
        assert found.grad is not None and parameter.grad is not None
        assert (found.grad - parameter.grad).norm() <= 0.05 * parameter.grad.norm(), name


def test_helpers_end_when_they_are_not_used_any_more(make_rollout: Make) -> None:
    before = set(threading.enumerate())
    parts = impala(mlp(), bytes_at_once=COLUMN, num_threads=3)
    parts.update(make_rollout(T, 6))
    helpers = set(threading.enumerate()) - before
    assert 1 <= len(helpers) <= 2
    del parts
    gc.collect()
    for thread in helpers:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("columns", "worth", "num_threads", "expected"),
    [
        (8, 1, 1, [8, 8]),
        (8, 1, 2, [8, 8]),
        (8, 1, 4, [4, 4, 4, 4]),
        (16, 6, 4, [5, 5, 6]),
        (16, 32, 4, [16]),
        (2, 6, 1, [2] * 8),
    ],
)
def test_slices_fit_the_cache_and_occupy_the_threads_where_they_are_worth_one(
    make_rollout: Make,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    worth: int,
    num_threads: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr("torchbeast.core.update.minibatch.WORTH_A_THREAD", worth * COLUMN)
    slices = Slices(mlp(), columns * COLUMN, num_threads).split(make_rollout(T, 16))
    assert [part.batch_size for part in slices] == expected


def test_without_a_size_the_batch_stays_whole(make_rollout: Make) -> None:
    assert len(Slices(mlp(), None, 4).split(make_rollout(T, 16))) == 1


@pytest.mark.parametrize(("net", "expected"), [(MLPNet, 1), (DeepNet, 2), (AtariNet, 9)])
def test_a_large_recurrent_layer_is_not_fed_few_columns_at_a_time(net: Any, expected: int) -> None:
    """Their LSTMs have 0.6, 2.1 and 17 MB."""
    frames = ArraySpec((4, 84, 84), "uint8")
    assert least_columns(net(frames, Discrete(6), True)) == expected
    assert least_columns(net(frames, Discrete(6), False)) == 1


def test_slices_are_as_wide_as_a_recurrent_layer_needs(
    make_rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.core.update.minibatch.least_columns", lambda model: 3)
    slices = Slices(mlp(), 1, 2).split(make_rollout(T, 6))
    assert [part.batch_size for part in slices] == [3, 3]


@pytest.mark.parametrize(("threads", "expected"), [(1, [8]), (2, [4, 4]), (8, [4, 4])])
def test_a_small_batch_is_divided_though_a_recurrent_layer_needs_more_columns(
    make_rollout: Make, monkeypatch: pytest.MonkeyPatch, threads: int, expected: list[int]
) -> None:
    monkeypatch.setattr("torchbeast.core.update.minibatch.least_columns", lambda model: 9)
    slices = Slices(mlp(), 1, threads).split(make_rollout(T, 8))
    assert [part.batch_size for part in slices] == expected
