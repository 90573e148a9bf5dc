# SPDX-License-Identifier: Apache-2.0
"""The KL to the implied policy, against its definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from implied_policy import by_definition, probabilities
from torch import Tensor

from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.algos.laser import implied_policy_kl
from torchbeast.core.envs.spaces import Discrete, MultiBinary, MultiDiscrete

T, B = 6, 5


def beta(pi: list[float], mu: list[float], rho_bar: float = 1.0) -> float:
    """The function under test, of probabilities."""
    return implied_policy_kl(torch.tensor(pi).log(), torch.tensor(mu).log(), rho_bar).item()


def swapped(num_actions: int, rest: float) -> tuple[list[float], list[float]]:
    """Two opposite policies, each sure of its own action but for `rest`, shared by the others."""
    others = rest / (num_actions - 1)
    pi = [1 - rest, *[others] * (num_actions - 1)]
    return pi, pi[::-1]


@pytest.mark.parametrize(
    ("rho_bar", "num_actions", "scale"),
    [(0.5, 2, 4.0), (1.0, 6, 1.0), (2.0, 18, 0.1), (0.5, 18, 1.0)],
)
def test_beta_is_the_kl_to_the_implied_policy(
    rho_bar: float, num_actions: int, scale: float
) -> None:
    p, q = scale * torch.randn(2, T, B, num_actions)
    found = implied_policy_kl(p.log_softmax(-1), q.log_softmax(-1), rho_bar)
    assert found.shape == (T, B) and found.dtype == torch.float32
    expected = [
        [by_definition(probabilities(p[t, b]), probabilities(q[t, b]), rho_bar) for b in range(B)]
        for t in range(T)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_a_constant_added_to_logits_changes_no_beta() -> None:
    p, q = torch.randn(2, T, B, 6)
    actions = distribution_for(Discrete(6))
    found = implied_policy_kl(actions.all_log_probs(p + 20.0), actions.all_log_probs(q - 7.0))
    expected = implied_policy_kl(actions.all_log_probs(p), actions.all_log_probs(q))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected > 0.05).any()


def test_beta_of_equal_policies_is_0_and_never_negative() -> None:
    log_probs = (3 * torch.randn(500, 6)).log_softmax(-1)
    found = implied_policy_kl(log_probs, log_probs)
    assert (found >= 0).all() and (found < 1e-6).all()


def test_beta_is_0_where_the_limit_clips_nothing() -> None:
    """min(rho_bar mu, pi) is pi then: V-trace is unbiased."""
    assert beta([0.9, 0.1], [0.1, 0.9], rho_bar=1e4) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("num_actions", [2, 3, 6, 18])
def test_opposite_policies_are_irrelevant_to_each_other(num_actions: int) -> None:
    """beta is greater than every threshold that is worth a try (0.03 to 0.3)."""
    assert beta(*swapped(num_actions, 0.05)) > 0.4


@pytest.mark.parametrize("num_actions", [2, 3, 6, 18])
def test_beta_of_swapped_policies_stays_below_log_n(num_actions: int) -> None:
    """The implied policy is nearly uniform; with two actions a threshold of 1 accepts them."""
    for rest in (0.3, 0.1, 1e-2, 1e-4):
        pi, mu = swapped(num_actions, rest)
        entropy = -sum(p * math.log(p) for p in pi)
        if num_actions == 2:
            assert beta(pi, mu) == pytest.approx(math.log(2) - entropy, abs=1e-4)
        assert beta(pi, mu) < math.log(num_actions)
    assert beta(*swapped(num_actions, 1e-5)) == pytest.approx(math.log(num_actions), abs=1e-3)


def test_beta_has_no_bound_where_the_behaviour_is_surer_than_the_policy() -> None:
    """V-trace then evaluates the action that the policy does not prefer."""
    pi, mu = [0.9, 0.1], [1e-6, 1 - 1e-6]
    assert beta(pi, mu) == pytest.approx(by_definition(pi, mu), rel=1e-4)
    assert beta(pi, mu) > 9.0


@pytest.mark.parametrize(
    ("pi", "mu", "expected"),
    [
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], 0.0),  # neither does the last
        ([0.5, 0.5, 0.0], [0.25, 0.25, 0.5], 0.0),  # the policy has been told not to
        ([0.5, 0.25, 0.25], [0.5, 0.5, 0.0], math.inf),  # it has never been seen
        ([1.0, 0.0], [0.0, 1.0], math.inf),  # nothing in common
    ],
)
def test_actions_that_are_ruled_out_count_as_by_the_definition(
    pi: list[float], mu: list[float], expected: float
) -> None:
    assert by_definition(pi, mu) == pytest.approx(expected)
    assert beta(pi, mu) == pytest.approx(expected, abs=1e-6)


def test_an_action_too_rare_for_float32_counts_as_one_that_is_never_taken() -> None:
    log_pi, log_mu = torch.tensor([0.0, -150.0]), torch.tensor([0.0, -math.inf])
    assert implied_policy_kl(log_pi, log_mu).item() == 0.0


def test_beta_of_a_nan_is_nan() -> None:
    log_pi = torch.tensor([math.nan, math.nan])
    assert implied_policy_kl(log_pi, torch.tensor([0.5, 0.5]).log()).isnan()


@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (MultiDiscrete((2, 3, 2)), (2, 3, 2)),
        (MultiBinary((2, 2)), (2, 2, 2, 2)),
        ((Discrete(3), {"b": MultiBinary((2,)), "a": Discrete(2)}), (3, 2, 2, 2)),
    ],
    ids=str,
)
def test_beta_of_joint_actions_is_computed_from_the_joint_policies(space: Any, sizes: Any) -> None:
    """It is not the sum over the choices: the minimum does not factorise."""
    actions = distribution_for(space)
    p, q = 2 * torch.randn(2, B, actions.num_params)
    found = implied_policy_kl(actions.all_log_probs(p), actions.all_log_probs(q))
    sums = torch.zeros(B)
    for b in range(B):
        parts = [choices_of(space, logits[b]) for logits in (p, q)]
        pi, mu = ([math.prod(joint) for joint in itertools.product(*part)] for part in parts)
        assert len(pi) == math.prod(sizes)
        assert found[b].item() == pytest.approx(by_definition(pi, mu), rel=1e-4, abs=1e-6)
        sums[b] = sum(by_definition(*pair) for pair in zip(*parts, strict=True))
    assert ((found - sums).abs() > 0.01).any()


def choices_of(space: Any, params: Tensor) -> list[list[float]]:
    """The probabilities of each independent choice."""
    match space:
        case Discrete():
            return [probabilities(params)]
        case MultiDiscrete(nvec):
            return [probabilities(own) for own in params.split(list(nvec))]
        case MultiBinary():
            coins = params.double().sigmoid().tolist()
            return [[1 - one, one] for one in coins]
    first, rest = space
    sizes = [distribution_for(part).num_params for part in (first, rest["a"], rest["b"])]
    parts = zip((first, rest["a"], rest["b"]), params.split(sizes), strict=True)
    return [choice for part, own in parts for choice in choices_of(part, own)]


def test_beta_has_no_graph_and_is_computed_in_float32() -> None:
    p = torch.randn(T, B, 6, dtype=torch.bfloat16, requires_grad=True)
    found = implied_policy_kl(p.float().log_softmax(-1), torch.randn(T, B, 6).log_softmax(-1))
    assert not found.requires_grad and found.dtype == torch.float32
    log_pi, log_mu = torch.randn(2, T, B, 6).log_softmax(-1).bfloat16()
    exact = implied_policy_kl(log_pi.float(), log_mu.float())
    torch.testing.assert_close(implied_policy_kl(log_pi, log_mu), exact, rtol=0, atol=0)
