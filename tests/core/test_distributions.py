# SPDX-License-Identifier: Apache-2.0
"""Distributions over action spaces, against torch.distributions and by counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as td

from torchbeast.core.distributions import distribution_for
from torchbeast.core.envs.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torchbeast.core.nest_py import flatten, map_leaves, map_leaves2

T, B = 5, 3
PENDULUM = Box(low=-2.0, high=(6.0, 2.0), shape=(2,))
UNBOUNDED = Box(low=-math.inf, high=math.inf, shape=(2, 2))
EVERYTHING: dict[str, Any] = {
    "move": (Discrete(4), MultiDiscrete((2, 3))),
    "aim": PENDULUM,
    "keys": MultiBinary((2, 2)),
}
SPACES = [
    Discrete(6),
    Discrete(3, start=-1),
    MultiDiscrete((2, 5, 3)),
    MultiBinary((4,)),
    MultiBinary((2, 3)),
    PENDULUM,
    UNBOUNDED,
    Box(low=0.0, high=1.0, shape=(), dtype="float64"),
    EVERYTHING,
]


def reference(space: Any, params: Tensor) -> td.Distribution:
    """The distribution of torch that ours should equal, for spaces of one leaf."""
    match space:
        case Discrete():
            return td.Categorical(logits=params)
        case MultiBinary():
            return td.Independent(td.Bernoulli(logits=params), 1)
        case Box():
            mean, log_std = params.chunk(2, -1)
            log_std = log_std.clamp(-5, 2)
            low, high = torch.tensor(space.low), torch.tensor(space.high)
            bounded = low.isfinite()
            centre = torch.where(bounded, (low + high) / 2, 0.0)
            scale = torch.where(bounded, (high - low) / 2, 1.0)
            return td.Independent(td.Normal(centre + scale * mean, scale * log_std.exp()), 1)
    raise NotImplementedError(space)


def as_reference_takes_it(space: Any, action: Any) -> Tensor:
    """Starts removed and entries flattened."""
    if isinstance(space, Discrete):
        return action - space.start
    return action.reshape(T, B, -1).float()


ONE_LEAF = [space for space in SPACES if isinstance(space, (Discrete, MultiBinary, Box))]


@pytest.mark.parametrize("space", ONE_LEAF, ids=str)
def test_log_prob_entropy_and_kl_are_those_of_torch(space: Any) -> None:
    ours = distribution_for(space)
    p, q = torch.randn(2, T, B, ours.num_params)
    action = ours.sample(p)
    theirs_p, theirs_q = reference(space, p), reference(space, q)
    expected = theirs_p.log_prob(as_reference_takes_it(space, action))
    torch.testing.assert_close(ours.log_prob(p, action), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy(p), theirs_p.entropy(), rtol=1e-4, atol=1e-4)
    expected = td.kl_divergence(theirs_p, theirs_q)
    torch.testing.assert_close(ours.kl(p, q), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_have_the_shape_and_dtype_that_zero_actions_have(space: Any) -> None:
    ours = distribution_for(space)
    params = torch.randn(T, B, ours.num_params)
    zero = ours.zero_action((T, B))

    def check(a: Tensor, b: Tensor) -> None:
        assert a.shape == b.shape
        assert a.dtype == b.dtype

    map_leaves2(check, ours.sample(params), zero)
    map_leaves2(check, ours.mode(params), zero)
    assert len(flatten(zero)) == len(flatten(space))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_quantity_is_one_number_per_row(space: Any) -> None:
    ours = distribution_for(space)
    params = torch.randn(T, B, ours.num_params)
    zero = ours.zero_action((T, B))
    assert ours.log_prob(params, zero).shape == (T, B)
    assert ours.log_prob(params, zero).isfinite().all()
    assert ours.entropy(params).shape == (T, B)
    assert ours.kl(params, params).shape == (T, B)
    assert ours.features(zero).shape == (T, B, ours.num_features)
    assert ours.features(zero).dtype == torch.float32


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_kl_is_0_to_itself_and_positive_to_others(space: Any) -> None:
    ours = distribution_for(space)
    p, q = torch.randn(2, T, B, ours.num_params)
    torch.testing.assert_close(ours.kl(p, p), torch.zeros(T, B))
    assert (ours.kl(p, q) > 0).all()


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_mode_is_at_least_as_likely_as_every_sample(space: Any) -> None:
    ours = distribution_for(space)
    params = torch.randn(T, B, ours.num_params)
    best = ours.log_prob(params, ours.mode(params)) + 1e-4
    for _ in range(20):
        assert (ours.log_prob(params, ours.sample(params)) <= best).all()


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_mean_log_prob_of_samples_is_the_negative_entropy(space: Any) -> None:
    ours = distribution_for(space)
    params = torch.randn(ours.num_params)
    many = params.expand(20_000, -1)
    log_probs = ours.log_prob(many, ours.sample(many))
    error = log_probs.std() / math.sqrt(len(many))
    assert abs(log_probs.mean() + ours.entropy(params)) < 5 * error + 1e-6


def test_categorical_samples_come_as_often_as_their_probability() -> None:
    ours, count = distribution_for(Discrete(4)), 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, -math.inf])
    actions = ours.sample(logits.expand(count, -1))
    frequencies = torch.bincount(actions, minlength=4) / count
    torch.testing.assert_close(frequencies, logits.softmax(-1), rtol=0, atol=0.02)
    assert frequencies[3] == 0


def test_gaussian_samples_have_the_box_as_their_unit() -> None:
    ours = distribution_for(PENDULUM)  # centres 2 and 0, half widths 4 and 2
    params = torch.tensor([0.5, -1.0, math.log(0.5), 0.0])
    actions = ours.sample(params.expand(40_000, -1))
    torch.testing.assert_close(actions.mean(0), torch.tensor([4.0, -2.0]), rtol=0, atol=0.1)
    torch.testing.assert_close(actions.std(0), torch.tensor([2.0, 2.0]), rtol=0, atol=0.1)


def test_a_discrete_space_may_start_anywhere() -> None:
    ours = distribution_for(Discrete(3, start=-1))
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    assert ours.mode(logits).tolist() == [1]
    assert set(ours.sample(torch.zeros(200, 3)).tolist()) == {-1, 0, 1}
    assert ours.features(torch.tensor([-1, 1])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_a_multi_discrete_log_prob_is_the_sum_over_its_choices() -> None:
    ours = distribution_for(MultiDiscrete((2, 3)))
    params, action = torch.randn(T, B, 5), torch.tensor([1, 2]).expand(T, B, 2)
    first, second = params[..., :2].log_softmax(-1), params[..., 2:].log_softmax(-1)
    torch.testing.assert_close(ours.log_prob(params, action), first[..., 1] + second[..., 2])


def test_a_product_gives_its_parts_their_parameters_in_key_order() -> None:
    space = {"b": Discrete(3), "a": Discrete(2)}
    ours = distribution_for(space)
    params = torch.randn(T, B, 5)
    action = ours.mode(params)
    assert action["a"].equal(params[..., :2].argmax(-1))
    assert action["b"].equal(params[..., 2:].argmax(-1))
    a = distribution_for(space["a"]).log_prob(params[..., :2], action["a"])
    b = distribution_for(space["b"]).log_prob(params[..., 2:], action["b"])
    torch.testing.assert_close(ours.log_prob(params, action), a + b)


def test_a_constant_added_to_logits_changes_nothing() -> None:
    ours = distribution_for(Discrete(4))
    p, q = torch.randn(2, T, B, 4)
    action = ours.sample(p)
    torch.testing.assert_close(ours.log_prob(p, action), ours.log_prob(p + 9, action))
    torch.testing.assert_close(ours.entropy(p), ours.entropy(p + 9))
    torch.testing.assert_close(ours.kl(p, q), ours.kl(p + 9, q - 9))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_log_prob_and_entropy_have_finite_gradients(space: Any) -> None:
    ours = distribution_for(space)
    params = torch.randn(T, B, ours.num_params, requires_grad=True)
    action = map_leaves(lambda leaf: leaf, ours.sample(params.detach()))
    (ours.log_prob(params, action) + ours.entropy(params)).sum().backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    assert params.grad.any()


def test_a_box_of_integers_is_refused_with_its_dtype() -> None:
    with pytest.raises(ValueError, match="float dtype, got int32"):
        distribution_for(Box(0.0, 3.0, (2,), "int32"))


def test_what_is_no_action_space_is_refused() -> None:
    with pytest.raises(ValueError, match="no distribution for the action space 'left'"):
        distribution_for("left")
