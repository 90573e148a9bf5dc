# SPDX-License-Identifier: Apache-2.0
"""The squashed Gaussian, against its definition: an action is low enough where its u is.

F(a) = Phi((atanh((a - centre) / scale) - mean) / deviation) is the distribution function; densities
are its differences, and entropies and means are integrals over u, all in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.distributions import Gaussian, SquashedGaussian, distribution_for
from torchbeast.core.envs.spaces import Box, Discrete

LOW, HIGH = -2.0, 6.0
CENTRE, SCALE = 2.0, 4.0
BOX = Box(LOW, HIGH, ())
POLICIES = [(0.0, 0.0), (0.3, -1.0), (-1.5, 0.5), (0.1, -4.0), (2.0, -0.5), (0.5, 2.0)]

every_policy = pytest.mark.parametrize(("mean", "log_std"), POLICIES)


def params_of(mean: float, log_std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([mean, log_std], dtype=dtype)


def chance_below(action: np.ndarray, mean: float, log_std: float) -> np.ndarray:
    z = (np.arctanh((action - CENTRE) / SCALE) - mean) / math.exp(log_std)
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])


def over_normal(values: np.ndarray, z: np.ndarray) -> float:
    """The mean of values at z under a standard normal distribution."""
    return float(np.trapezoid(values * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi), z))


@every_policy
def test_the_density_is_the_slope_of_the_distribution_function(mean: float, log_std: float) -> None:
    u = mean + math.exp(log_std) * np.linspace(-2.0, 2.0, 41)
    squashed = np.tanh(u[np.abs(u) < 4.0])
    action, step = CENTRE + SCALE * squashed, 1e-6 * (1.0 - np.abs(squashed))
    assert len(action) > 8
    ends = [chance_below(action + sign * step, mean, log_std) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * step)
    ours = SquashedGaussian(BOX).log_prob(params_of(mean, log_std), torch.tensor(action))
    np.testing.assert_allclose(ours.exp().numpy(), slope, rtol=5e-3, atol=1e-6)


@every_policy
def test_the_density_integrates_to_1(mean: float, log_std: float) -> None:
    """Over actions from u = -8 to 8, beyond which float32 knows no action."""
    edges = CENTRE + SCALE * np.tanh(np.linspace(-8.0, 8.0, 200_001))
    middles = torch.tensor((edges[1:] + edges[:-1]) / 2)
    density = SquashedGaussian(BOX).log_prob(params_of(mean, log_std), middles).double().exp()
    expected = np.diff(chance_below(edges[[0, -1]], mean, log_std))
    assert float((density * torch.tensor(np.diff(edges))).sum()) == pytest.approx(
        expected, abs=5e-3
    )


@every_policy
@pytest.mark.parametrize("how", ["sample", "rsample"])
def test_samples_fall_into_each_part_of_the_box_as_often_as_they_should(
    mean: float, log_std: float, how: str
) -> None:
    torch.manual_seed(3)
    count, distribution = 100_000, SquashedGaussian(BOX)
    params = params_of(mean, log_std).expand(count, 2)
    sampled = distribution.sample(params) if how == "sample" else distribution.rsample(params)[0]
    inner = CENTRE + SCALE * np.tanh(np.linspace(-3.0, 3.0, 13))
    found, _ = np.histogram(sampled.numpy(), [LOW, *inner, HIGH])
    below = [0.0, *chance_below(inner, mean, log_std), 1.0]
    assert found.sum() == count
    np.testing.assert_allclose(found / count, np.diff(below), atol=5 * 0.5 / math.sqrt(count))


@every_policy
def test_rsample_says_the_log_probability_of_its_own_action(mean: float, log_std: float) -> None:
    distribution, params = SquashedGaussian(BOX), params_of(mean, log_std).expand(1000, 2)
    action, log_prob = distribution.rsample(params)
    inside = ((action - CENTRE) / SCALE).abs() < 0.999
    assert inside.sum() > 30
    expected = distribution.log_prob(params, action)
    torch.testing.assert_close(log_prob[inside], expected[inside], rtol=1e-3, atol=5e-3)


@every_policy
def test_the_entropy_is_the_integral_of_its_definition(mean: float, log_std: float) -> None:
    z = np.linspace(-10.0, 10.0, 400_001)
    u = mean + math.exp(log_std) * z
    log_slope = 2 * (math.log(2.0) - u - np.logaddexp(0.0, -2.0 * u))
    log_density = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi) - math.log(SCALE) - log_slope
    expected = -over_normal(log_density, z)
    found = SquashedGaussian(BOX).entropy(params_of(mean, log_std))
    assert found.item() == pytest.approx(expected, abs=2e-3)


@every_policy
def test_gradients_of_samples_densities_and_entropies_are_their_slopes(
    mean: float, log_std: float
) -> None:
    if log_std == 2.0:
        log_std = 1.9  # off the bound, on which a slope has two sides
    distribution, params = SquashedGaussian(BOX), params_of(mean, log_std, torch.float64)
    action = torch.tensor([2.5, 0.0], dtype=torch.float64)

    def sampled(p: Tensor) -> Tensor:
        torch.manual_seed(5)
        drawn, log_prob = distribution.rsample(p.expand(64, 2))
        return drawn.double().mean() + log_prob.mean()

    def densities(p: Tensor) -> Tensor:
        return distribution.log_prob(p.expand(2, 2), action).sum()

    for function in (sampled, densities, distribution.entropy):
        leaf = params.clone().requires_grad_()
        function(leaf).backward()
        for index in range(2):
            step = 1e-4 * torch.nn.functional.one_hot(torch.tensor(index), 2)
            slope = (function(params + step) - function(params - step)) / 2e-4
            assert leaf.grad[index].item() == pytest.approx(slope.item(), rel=1e-2, abs=1e-2)


def test_kl_is_what_the_log_probabilities_differ_by_on_average() -> None:
    distribution = SquashedGaussian(BOX)
    p, q = params_of(0.3, -0.5), params_of(-0.2, 0.1)
    torch.manual_seed(0)
    action = distribution.sample(p.expand(200_000, 2))
    at_p, at_q = (distribution.log_prob(at.expand(200_000, 2), action) for at in (p, q))
    difference = at_p - at_q
    assert distribution.kl(p, q).item() == pytest.approx(difference.mean().item(), abs=0.01)
    assert torch.equal(distribution.kl(p, q), Gaussian(BOX).kl(p, q))


def test_half_of_the_samples_lie_below_the_mode() -> None:
    torch.manual_seed(0)
    distribution, params = SquashedGaussian(BOX), params_of(0.7, 0.5).expand(40_000, 2)
    mode = distribution.mode(params[0])
    assert mode.item() == pytest.approx(CENTRE + SCALE * math.tanh(0.7), abs=1e-5)
    below = (distribution.sample(params) < mode).float().mean()
    assert below.item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("mean", [-1e6, -50.0, -9.0, 9.0, 50.0, 1e6])
@pytest.mark.parametrize("log_std", [-50.0, 0.0, 50.0])
def test_nothing_is_infinite_however_far_out_the_policy_is(mean: float, log_std: float) -> None:
    distribution = SquashedGaussian(Box((-0.1, 0.0), (0.3, 1e-3), (2,)))
    params = torch.tensor([mean, mean, log_std, log_std]).expand(64, 4).clone().requires_grad_()
    action, log_prob = distribution.rsample(params)
    corner = torch.tensor([[-0.1, 1e-3]])
    metrics = [
        log_prob,
        distribution.log_prob(params, action.detach()),
        distribution.log_prob(params, corner),
        distribution.entropy(params),
    ]
    assert all(figure.isfinite().all() for figure in metrics)
    (action.sum() + sum(figure.sum() for figure in metrics)).backward()
    assert params.grad.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_action_leaves_the_box(dtype: str) -> None:
    low, high = (-0.1, 0.1, -3.3), (0.3, 0.7, 1e-3)
    distribution = SquashedGaussian(Box(low, high, (3,), dtype))
    params = torch.randn(10_000, 6) * 20
    for action in (distribution.sample(params), distribution.mode(params)):
        assert action.dtype == getattr(torch, dtype)
        assert (action >= torch.tensor(low, dtype=action.dtype)).all()
        assert (action <= torch.tensor(high, dtype=action.dtype)).all()


def test_it_may_be_asked_for_wherever_a_space_has_a_box() -> None:
    space = {"aim": Box(-1.0, 1.0, (2,)), "fire": Discrete(2)}
    distribution = distribution_for(space, over_box=SquashedGaussian)
    params = 30 * torch.randn(100, distribution.num_params)
    assert distribution.num_params == 4 + 2
    assert distribution.sample(params)["aim"].abs().max() <= 1.0
    assert isinstance(distribution_for(BOX), Gaussian)
    assert not isinstance(distribution_for(BOX), SquashedGaussian)
