# SPDX-License-Identifier: Apache-2.0
"""Running statistics: against numpy's mean and variance of all that was observed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchbeast.core.actors.running_norm import LIMIT, RunningNorm

SIZES = (3, 1, 40, 7)


def observed(norm: RunningNorm, batches: list[torch.Tensor]) -> RunningNorm:
    for batch in batches:
        norm.observe(batch)
    return norm


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_every_entry_has_the_statistics_of_all_its_values(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(rng.uniform(-5, 5), 3, (n, 4)) * [1, 10, 1e6, 1e-2] for n in SIZES]
    batches = [batch.reshape(-1, *shape) for batch in batches]
    norm = observed(RunningNorm(shape), [torch.from_numpy(batch) for batch in batches])
    together = np.concatenate(batches)
    np.testing.assert_allclose(norm.mean, together.mean(0), rtol=1e-9)
    np.testing.assert_allclose(norm.variance, together.var(0), rtol=1e-9)
    assert norm.count == len(together)
    expected = (together - together.mean(0)) / together.std(0)
    np.testing.assert_allclose(norm(torch.from_numpy(together)), expected, rtol=1e-4, atol=1e-5)


def test_a_number_of_no_dimension_is_normalised_too() -> None:
    norm = observed(RunningNorm(()), [torch.tensor([1, 3], dtype=torch.int64)])
    torch.testing.assert_close(norm(torch.tensor([1, 3, 4])), torch.tensor([-1.0, 1.0, 2.0]))


def test_large_integers_that_differ_by_one_stay_apart() -> None:
    values = torch.tensor([[10**12], [10**12 + 1]])
    norm = observed(RunningNorm((1,)), [values])
    torch.testing.assert_close(norm(values), torch.tensor([[-1.0], [1.0]]))


def test_before_anything_was_observed_numbers_are_only_limited() -> None:
    values = torch.tensor([[0.5, -3.0, 1e9, -1e9]])
    assert RunningNorm((4,))(values).tolist() == [[0.5, -3.0, LIMIT, -LIMIT]]


def test_a_number_that_never_changes_is_zero() -> None:
    norm = observed(RunningNorm((1,)), [torch.full((5, 1), 123_456)] * 3)
    assert norm(torch.full((2, 1), 123_456)).tolist() == [[0.0], [0.0]]
    assert norm(torch.full((1, 1), 123_457)).tolist() == [[LIMIT]]


def test_looking_changes_nothing() -> None:
    norm = observed(RunningNorm((2,)), [torch.randn(5, 2)])
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    norm(torch.randn(9, 2) + 100)
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.float16, torch.float64])
def test_what_comes_out_is_float32(dtype: torch.dtype) -> None:
    norm = observed(RunningNorm((2,)), [torch.ones(3, 2).to(dtype)])
    assert norm(torch.ones(3, 2).to(dtype)).dtype == torch.float32
