# SPDX-License-Identifier: Apache-2.0
"""Distributions over action spaces, against torch.distributions and by counting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as td

from torchbeast.core.actors.distributions import Gaussian, distribution_for
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.envs.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torchbeast.errors import UsageError

T, B = 5, 3
PENDULUM = Box(low=-2.0, high=(6.0, 2.0), shape=(2,))
UNBOUNDED = Box(low=-math.inf, high=math.inf, shape=(2, 2))
EVERYTHING: dict[str, Any] = {
    "move": (Discrete(4), MultiDiscrete((2, 3))),
    "aim": PENDULUM,
    "keys": MultiBinary((2, 2)),
}
GRID = Box((0, -1), (3, 1), (1, 2), "int32")
SPACES = [
    Discrete(6),
    Discrete(3, start=-1),
    MultiDiscrete((2, 5, 3)),
    MultiBinary((4,)),
    MultiBinary((2, 3)),
    PENDULUM,
    UNBOUNDED,
    Box(low=0.0, high=1.0, shape=(), dtype="float64"),
    GRID,
    Box(-5, 5, (), "int8"),
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


ONE_LEAF = [
    space
    for space in SPACES
    if isinstance(space, (Discrete, MultiBinary))
    or (isinstance(space, Box) and not space.is_integer)
]


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


def test_a_space_of_gymnasium_without_a_distribution_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="type Text is not supported"):
        distribution_for(gymnasium.spaces.Text(3))


def test_a_distribution_of_ones_own_may_be_a_part_of_a_product() -> None:
    class Own(Gaussian):
        def __init__(self, box: Box) -> None:
            super().__init__(box)
            del self.deviations  # which only built-in networks need

    assert distribution_for((Discrete(2), PENDULUM), Own).deviations == [False] * 6


def test_categorical_samples_come_as_often_as_their_probability() -> None:
    ours, count = distribution_for(Discrete(4)), 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, -math.inf])
    actions = ours.sample(logits.expand(count, -1))
    frequencies = torch.bincount(actions, minlength=4) / count
    torch.testing.assert_close(frequencies, logits.softmax(-1), rtol=0, atol=0.02)
    assert frequencies[3] == 0


MASKS = [
    (Discrete(4), [1, 3]),
    (Discrete(3, start=2), [0]),
    (MultiDiscrete((2, 3)), [0, 3]),
    (GRID, [0, 5]),
    (MultiBinary((3,)), [1]),
    ((Discrete(2), MultiBinary((2,))), [1, 3]),
]


def by_enumeration(space: Any, params: Tensor) -> list[tuple[Any, Tensor]]:
    """Every action of a small discrete space with its probability, as double [...]."""
    params = params.double()
    match space:
        case Discrete(n, start):
            probs = params.softmax(-1)
            return [(torch.tensor(start + i), probs[..., i]) for i in range(n)]
        case MultiDiscrete(nvec):
            parts = tuple(Discrete(n) for n in nvec)
            pairs = by_enumeration(parts, params)
            return [(torch.stack(action), prob) for action, prob in pairs]
        case Box(low, high, shape):
            bounds = zip(low, high, strict=True)
            parts = tuple(Discrete(last - first + 1, first) for first, last in bounds)
            pairs = by_enumeration(parts, params)
            return [(torch.stack(action).reshape(shape), prob) for action, prob in pairs]
        case MultiBinary((n,)):
            coins = params.sigmoid()
            pairs = [((), torch.ones(params.shape[:-1], dtype=torch.double))]
            for i in range(n):
                heads = [((*bits, 1), p * coins[..., i]) for bits, p in pairs]
                pairs = [((*bits, 0), p * (1 - coins[..., i])) for bits, p in pairs] + heads
            return [(torch.tensor(bits, dtype=torch.int8), p) for bits, p in pairs]
    first, *rest = space
    size = distribution_for(first).num_params
    pairs = [((a,), p) for a, p in by_enumeration(first, params[..., :size])]
    if not rest:
        return pairs
    others = by_enumeration(tuple(rest), params[..., size:])
    return [((*a, *b), p * q) for a, p in pairs for b, q in others]


def masked(space: Any, where: list[int], count: int = 1) -> Tensor:
    """[count, T, B, num_params] random logits, -inf in the places that are ruled out."""
    params = torch.randn(count, T, B, distribution_for(space).num_params)
    params[..., where] = -math.inf
    return params


@pytest.mark.parametrize(("space", "where"), MASKS, ids=str)
def test_choices_ruled_out_add_nothing_to_entropy_and_kl(space: Any, where: list[int]) -> None:
    ours = distribution_for(space)
    p, q = masked(space, where, 2)
    entropy, divergence = torch.zeros(2, T, B, dtype=torch.double)
    for (_, a), (_, b) in zip(by_enumeration(space, p), by_enumeration(space, q), strict=True):
        entropy -= torch.where(a > 0, a * a.log(), 0.0)
        divergence += torch.where(a > 0, a * (a / b).log(), 0.0)
    torch.testing.assert_close(ours.entropy(p).double(), entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.kl(p, q).double(), divergence, rtol=1e-4, atol=1e-5)
    assert ours.entropy(p).min() > 0 and ours.kl(p, q).min() > 0


@pytest.mark.parametrize(("space", "where"), MASKS, ids=str)
def test_choices_ruled_out_are_never_made_and_the_others_have_their_log_probability(
    space: Any, where: list[int]
) -> None:
    ours, (params,) = distribution_for(space), masked(space, where)
    possible = 0
    for action, prob in by_enumeration(space, params):
        rows = map_leaves(lambda leaf: leaf.expand(T, B, *leaf.shape), action)
        torch.testing.assert_close(ours.log_prob(params, rows).double(), prob.log())
        possible += prob.max() > 0
    assert 1 < possible < len(by_enumeration(space, params))
    for action in [ours.mode(params), *(ours.sample(params) for _ in range(50))]:
        assert ours.log_prob(params, action).isfinite().all()


@pytest.mark.parametrize(("space", "where"), MASKS, ids=str)
def test_choices_ruled_out_have_no_gradient_and_the_others_a_finite_one(
    space: Any, where: list[int]
) -> None:
    ours, (p, q) = distribution_for(space), masked(space, where, 2)
    p.requires_grad_()
    action = ours.sample(p.detach())
    for quantity in (ours.entropy(p), ours.kl(p, q), ours.kl(q, p), ours.log_prob(p, action)):
        (gradient,) = torch.autograd.grad(quantity.sum(), p)
        assert gradient.isfinite().all() and gradient.any()
        assert not gradient[..., where].any()


def test_a_distribution_is_infinitely_far_from_one_that_rules_out_what_it_does() -> None:
    ours, free = distribution_for(Discrete(2)), torch.zeros(2)
    ruled_out = torch.tensor([0.0, -math.inf])
    assert ours.kl(free, ruled_out) == math.inf
    torch.testing.assert_close(ours.kl(ruled_out, free), torch.tensor(math.log(2)))


LOG_STDS = [-9.0, -5.5, -5.0, -1.0, 2.0, 2.5, 9.0]


@pytest.mark.parametrize("log_std", LOG_STDS)
@pytest.mark.parametrize("outward", [False, True])
def test_a_deviation_beyond_its_bounds_comes_back_and_goes_no_further(
    log_std: float, outward: bool
) -> None:
    """The gradient is that of the bound itself where a step against it leads back, else 0."""
    ours = distribution_for(UNBOUNDED)
    params = torch.zeros(8)
    params[4:] = log_std
    params.requires_grad_()
    at_the_bound = params.detach().clone()
    at_the_bound[4:] = min(max(log_std, -5.0), 2.0)
    sign = (1.0 if outward else -1.0) * (1.0 if log_std > 0 else -1.0)
    loss = -sign * ours.entropy(params)  # minimised by a larger deviation where sign is 1
    (gradient,) = torch.autograd.grad(loss, params)
    assert loss == -sign * ours.entropy(at_the_bound), "the bounds hold"
    inside = -5.0 <= log_std <= 2.0
    expected = -sign if inside or not outward else 0.0
    assert gradient[4:].tolist() == [expected] * 4


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


def test_a_box_of_integers_has_the_choices_of_a_multi_discrete() -> None:
    ours, plain = distribution_for(GRID), distribution_for(MultiDiscrete((4, 3)))
    params = torch.randn(T, B, plain.num_params)
    action = plain.mode(params)
    assert isinstance(action, Tensor)
    shifted = (action + torch.tensor([0, -1])).unsqueeze(-2)
    torch.testing.assert_close(ours.mode(params), shifted, rtol=0, atol=0)
    for name in ("entropy", "all_log_probs"):
        found, expected = (getattr(each, name)(params) for each in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(ours.log_prob(params, shifted), plain.log_prob(params, action))
    assert torch.equal(ours.features(shifted), plain.features(action))


def test_spaces_of_gymnasium_have_the_same_distributions() -> None:
    space = gymnasium.spaces.Dict(
        {"b": gymnasium.spaces.Discrete(3, start=1), "a": gymnasium.spaces.Box(-1.0, 1.0, (2,))}
    )
    found, box = distribution_for(space), Box(-np.ones(2), np.ones(2), (2,))
    expected = distribution_for({"a": box, "b": Discrete(3, 1)})
    params = torch.randn(5, expected.num_params)
    assert found.num_params == expected.num_params
    torch.testing.assert_close(found.mode(params), expected.mode(params), rtol=0, atol=0)
    torch.testing.assert_close(found.entropy(params), expected.entropy(params), rtol=0, atol=0)


def test_what_is_no_action_space_is_refused() -> None:
    with pytest.raises(ValueError, match="no distribution for the action space 'left'"):
        distribution_for("left")


def actions_of(space: Any) -> list[Any]:
    """Every action, the last choice changing fastest."""
    match space:
        case Discrete(n, start):
            return [torch.tensor(start + choice) for choice in range(n)]
        case MultiDiscrete(nvec):
            return [torch.tensor(c) for c in itertools.product(*(range(n) for n in nvec))]
        case Box(low, high, shape):
            ranges = [range(int(a), int(b) + 1) for a, b in zip(low, high, strict=True)]
            return [torch.tensor(c).reshape(shape) for c in itertools.product(*ranges)]
        case MultiBinary(shape):
            choices = itertools.product((0, 1), repeat=math.prod(shape))
            return [torch.tensor(choice, dtype=torch.int8).reshape(shape) for choice in choices]
    parts = [actions_of(part) for part in flatten(space)]
    return [pack_as(space, list(joint)) for joint in itertools.product(*parts)]


ENUMERABLE = [
    *(space for space in SPACES if isinstance(space, (Discrete, MultiDiscrete, MultiBinary))),
    (Discrete(2), {"b": MultiBinary((2,)), "a": MultiDiscrete((3, 2))}),
    GRID,
]


@pytest.mark.parametrize("space", ENUMERABLE, ids=str)
def test_all_log_probs_are_those_of_every_action_in_order(space: Any) -> None:
    ours, actions = distribution_for(space), actions_of(space)
    params = 2 * torch.randn(T, B, ours.num_params)
    found = ours.all_log_probs(params)
    assert found.shape == (T, B, len(actions)) and ours.num_actions == len(actions)
    assert ours.is_enumerable
    for index, action in enumerate(actions):
        everywhere = map_leaves(lambda leaf: leaf.expand(T, B, *leaf.shape), action)
        torch.testing.assert_close(found[..., index], ours.log_prob(params, everywhere))
    torch.testing.assert_close(found.logsumexp(-1), torch.zeros(T, B), rtol=0, atol=1e-5)


def test_choices_that_are_ruled_out_are_so_in_every_joint_action() -> None:
    ours = distribution_for(MultiDiscrete((2, 2)))
    found = ours.all_log_probs(torch.tensor([0.0, -math.inf, 0.0, 0.0]))
    half = math.log(0.5)
    torch.testing.assert_close(found, torch.tensor([half, half, -math.inf, -math.inf]))


@pytest.mark.parametrize(
    "space",
    [
        PENDULUM,
        EVERYTHING,
        MultiBinary((11,)),
        MultiDiscrete((33, 32)),
        MultiBinary((210, 160)),
        (Discrete(600), Discrete(2)),
    ],
)
def test_actions_that_are_too_many_to_enumerate_are_refused(space: Any) -> None:
    ours = distribution_for(space)
    assert not ours.is_enumerable
    with pytest.raises(NotImplementedError, match="cannot be enumerated"):
        ours.all_log_probs(torch.zeros(ours.num_params))


def test_as_many_joint_actions_as_the_limit_are_enumerated() -> None:
    ours = distribution_for(MultiBinary((10,)))
    assert ours.all_log_probs(torch.randn(2, 10)).shape == (2, 1024)
