# SPDX-License-Identifier: Apache-2.0
"""A batch is learnt in pieces, by several threads; what is learnt is the same."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.contract import ModelInputs, ModelOutput
from torchbeast.core.actors.networks import AtariNet, DeepNet, MLPNet
from torchbeast.core.algos.impala import Impala, ImpalaConfig
from torchbeast.core.algos.pieces import Pieces, least_columns
from torchbeast.core.distributions import distribution_for
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.nest_py import map_leaves
from torchbeast.core.precision import computing_in
from torchbeast.core.storages.rollout import Rollout

T, ACTIONS = 5, 3
COLUMN = (T + 1) * 4 * 4  # bytes: observations of four floats
ENDS = {"terminated": [(2, 0), (3, 2)], "truncated": [(3, 0), (0, 1), (4, 2)]}
TIMEOUT_S = 30.0
Make = Callable[..., Rollout]


class Recording(Impala):
    """Remembers how many columns each backward had."""

    def losses(self, rollout: Rollout) -> dict[str, Tensor]:
        self.__dict__.setdefault("seen", []).append(rollout.batch_size)
        return super().losses(rollout)


def mlp(use_lstm: bool = False) -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), use_lstm)


def algorithm(kind: type[Impala], model: MLPNet, **settings: Any) -> Any:
    config = ImpalaConfig(total_steps=10_000, **settings)
    return kind(model, distribution_for(Discrete(ACTIONS)), config)


def assert_learns_the_same(some: Impala, whole: Impala, rollout: Rollout) -> None:
    """To the accuracy of float32: sums are added up in another order."""
    assert some.update(rollout) == pytest.approx(whole.update(rollout), rel=1e-4, abs=1e-6)
    for name, parameter in whole.model.named_parameters():
        found = some.model.get_parameter(name)
        torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(
        some.model.state_dict(), whole.model.state_dict(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("columns", "seen"), [(0, [1] * 5), (2, [1, 2, 2])])
def test_an_update_some_columns_at_a_time_is_the_update_of_all(
    make_rollout: Make,
    use_lstm: bool,
    reduction: str,
    num_threads: int,
    columns: int,
    seen: list[int],
) -> None:
    model = mlp(use_lstm)
    whole = algorithm(Impala, copy.deepcopy(model), loss_reduction=reduction)
    cut = {"bytes_at_once": columns * COLUMN, "num_threads": num_threads}
    parts = algorithm(Recording, model, loss_reduction=reduction, **cut)
    state = map_leaves(torch.randn_like, model.initial_state(5))
    assert_learns_the_same(parts, whole, make_rollout(T, 5, **ENDS, state=state))
    assert sorted(parts.seen) == seen


class Meeting(Impala):
    """Every backward waits until as many threads are in one."""

    def meet(self, num_threads: int) -> None:
        self.barrier = threading.Barrier(num_threads, timeout=TIMEOUT_S)
        self.threads: set[str] = set()

    def losses(self, rollout: Rollout) -> dict[str, Tensor]:
        self.threads.add(threading.current_thread().name)
        self.barrier.wait()
        return super().losses(rollout)


def test_several_threads_learn_at_the_same_time_and_the_caller_is_one(make_rollout: Make) -> None:
    model = mlp()
    whole = algorithm(Impala, copy.deepcopy(model))
    parts = algorithm(Meeting, model, bytes_at_once=2 * COLUMN, num_threads=3)
    parts.meet(3)
    assert_learns_the_same(parts, whole, make_rollout(T, 6))
    assert len(parts.threads) == 3
    assert threading.current_thread().name in parts.threads


class FailsBesides(Meeting):
    """The thread that did not ask fails, or the one that did; once."""

    asking_fails = False
    has_failed = False

    def losses(self, rollout: Rollout) -> dict[str, Tensor]:
        parts = super().losses(rollout)
        is_asking = threading.current_thread() is threading.main_thread()
        if is_asking == self.asking_fails and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("a piece went wrong")
        return parts


@pytest.mark.parametrize("asking_fails", [False, True])
def test_an_error_of_any_thread_is_raised_and_the_next_update_works(
    make_rollout: Make, asking_fails: bool
) -> None:
    parts = algorithm(FailsBesides, mlp(), bytes_at_once=3 * COLUMN, num_threads=2)
    parts.meet(2)
    parts.asking_fails = asking_fails
    before = copy.deepcopy(parts.model.state_dict())
    with pytest.raises(RuntimeError, match="a piece went wrong"):
        parts.update(make_rollout(T, 6))
    torch.testing.assert_close(parts.model.state_dict(), before, rtol=0, atol=0)
    whole = algorithm(Impala, copy.deepcopy(parts.model))
    assert_learns_the_same(parts, whole, make_rollout(T, 6))


class ComputesInBfloat16(MLPNet):
    """Its linear layers do, as features of images do."""

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        with computing_in(torch.bfloat16, inputs.reward.device):
            return super().forward(inputs, core_state)


def test_threads_in_bfloat16_lose_no_gradient_to_those_that_record_none(
    make_rollout: Make,
) -> None:
    """Values of truncated episodes are computed without a graph, while others record theirs."""
    model = ComputesInBfloat16(ArraySpec((4,), "float32"), Discrete(ACTIONS), False)
    whole = algorithm(Impala, copy.deepcopy(model))
    parts = algorithm(Impala, model, bytes_at_once=COLUMN, num_threads=3)
    rollout = make_rollout(
        T, 24, truncated=[(row, column) for row in (2, 4) for column in range(24)]
    )
    expected = whole.update(rollout)["grad_norm"]
    assert parts.update(rollout)["grad_norm"] == pytest.approx(expected, rel=0.02)
    for name, parameter in whole.model.named_parameters():
        found = model.get_parameter(name)
        assert found.grad is not None and parameter.grad is not None
        assert (found.grad - parameter.grad).norm() <= 0.05 * parameter.grad.norm(), name


def test_helpers_end_when_they_are_not_used_any_more(make_rollout: Make) -> None:
    before = set(threading.enumerate())
    parts = algorithm(Impala, mlp(), bytes_at_once=COLUMN, num_threads=3)
    parts.update(make_rollout(T, 6))
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2 and all(thread.daemon for thread in helpers)
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
def test_pieces_fit_the_cache_and_occupy_the_threads_where_they_are_worth_one(
    make_rollout: Make,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    worth: int,
    num_threads: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr("torchbeast.core.algos.pieces._WORTH_A_THREAD", worth * COLUMN)
    pieces = Pieces(mlp(), columns * COLUMN, num_threads).split(make_rollout(T, 16))
    assert [piece.batch_size for piece in pieces] == expected


def test_without_a_size_the_batch_stays_whole(make_rollout: Make) -> None:
    assert len(Pieces(mlp(), None, 4).split(make_rollout(T, 16))) == 1


@pytest.mark.parametrize(("net", "expected"), [(MLPNet, 1), (DeepNet, 2), (AtariNet, 9)])
def test_a_large_recurrent_layer_is_not_fed_few_columns_at_a_time(net: Any, expected: int) -> None:
    """Their LSTMs have 0.6, 2.1 and 17 MB."""
    frames = ArraySpec((4, 84, 84), "uint8")
    assert least_columns(net(frames, Discrete(6), True)) == expected
    assert least_columns(net(frames, Discrete(6), False)) == 1


def test_pieces_are_as_wide_as_a_recurrent_layer_needs(
    make_rollout: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchbeast.core.algos.pieces.least_columns", lambda model: 3)
    pieces = Pieces(mlp(), 1, 2).split(make_rollout(T, 6))
    assert [piece.batch_size for piece in pieces] == [3, 3]
