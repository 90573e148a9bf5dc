# SPDX-License-Identifier: Apache-2.0
"""The one recursion, against the sum it stands for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from torchbeast.core.returns import gae, n_step_targets, value_targets

T, B = 7, 4


def random_arguments(**overrides: torch.Tensor | None) -> dict[str, Any]:
    discounts = torch.full((T, B), 0.9)
    discounts[2, 0] = discounts[4, 1] = 0.0
    arguments: dict[str, Any] = {
        "rewards": torch.randn(T, B),
        "values": torch.randn(T, B),
        "bootstrap_value": torch.randn(B),
        "discounts": discounts,
        "rhos": 2 * torch.rand(T, B),
        "cs": torch.rand(T, B),
        "mask": torch.rand(T, B) < 0.7,
        "lambda_": 0.8,
    }
    return {**arguments, **overrides}


def by_definition(
    rewards: Any,
    values: Any,
    bootstrap_value: Any,
    discounts: Any,
    rhos: Any,
    cs: Any,
    mask: Any,
    lambda_: float,
) -> np.ndarray:
    """V_t + sum_s (prod of traces before s) (prod of masks up to s) rho_s (r_s + gamma V' - V)."""
    following = np.concatenate([values[1:], bootstrap_value[None]])
    targets = np.array(values, dtype=np.float64)
    for t in range(T):
        for s in range(t, T):
            trace = np.prod(discounts[t:s] * lambda_ * cs[t:s], axis=0)
            relevant = np.prod(mask[t : s + 1], axis=0)
            error = rewards[s] + discounts[s] * following[s] - values[s]
            targets[t] += trace * relevant * rhos[s] * error
    return targets


def as_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double().numpy() if torch.is_tensor(value) else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_the_recursion_equals_the_sum_it_stands_for(lambda_: float) -> None:
    arguments = random_arguments(lambda_=lambda_)
    expected = by_definition(**as_float64(arguments))
    np.testing.assert_allclose(value_targets(**arguments), expected, rtol=1e-4, atol=1e-5)


def test_absent_weights_and_mask_mean_one() -> None:
    ones = torch.ones(T, B)
    arguments = random_arguments(rhos=ones, cs=ones, mask=ones)
    absent = {**arguments, "rhos": None, "cs": None, "mask": None}
    torch.testing.assert_close(value_targets(**absent), value_targets(**arguments))


def test_without_weights_the_target_is_the_discounted_return() -> None:
    arguments = random_arguments(rhos=None, cs=None, mask=None, lambda_=1.0)
    expected = arguments["bootstrap_value"]
    returns = []
    for reward, discount in zip(
        reversed(arguments["rewards"]), reversed(arguments["discounts"]), strict=True
    ):
        expected = reward + discount * expected
        returns.append(expected)
    torch.testing.assert_close(value_targets(**arguments), torch.stack(returns[::-1]))


def test_lambda_0_is_the_one_step_target() -> None:
    arguments = random_arguments(rhos=None, cs=None, mask=None, lambda_=0.0)
    values = arguments["values"]
    following = torch.cat([values[1:], arguments["bootstrap_value"][None]])
    expected = arguments["rewards"] + arguments["discounts"] * following
    torch.testing.assert_close(value_targets(**arguments), expected)


def test_nothing_leaks_past_the_end_of_an_episode() -> None:
    arguments = random_arguments(mask=None)
    end = 2  # the discount of column 0 is 0 there
    before = value_targets(**arguments)[: end + 1, 0]
    for name in ("rewards", "values", "rhos", "cs", "discounts"):
        arguments[name][end + 1 :, 0] = 50.0
    arguments["bootstrap_value"][0] = -1e6
    assert torch.equal(value_targets(**arguments)[: end + 1, 0], before)


def test_a_truncated_episode_bootstraps_from_its_own_final_value() -> None:
    arguments = random_arguments(mask=None, lambda_=1.0)
    end, final_value = 2, torch.tensor([3.5])
    arguments["rewards"][end, 0] += 0.9 * final_value[0]
    together = value_targets(**arguments)[: end + 1, 0]
    arguments["rewards"][end, 0] -= 0.9 * final_value[0]
    alone = {
        name: value[: end + 1, :1].clone()
        for name, value in arguments.items()
        if torch.is_tensor(value) and name != "bootstrap_value"
    }
    alone["discounts"][end] = 0.9
    expected = value_targets(**alone, bootstrap_value=final_value)[:, 0]
    torch.testing.assert_close(together, expected)


def test_an_irrelevant_state_keeps_its_value_and_stops_the_return() -> None:
    arguments = random_arguments(mask=torch.ones(T, B, dtype=torch.bool), lambda_=1.0)
    arguments["mask"][3] = False
    targets = value_targets(**arguments)
    assert torch.equal(targets[3], arguments["values"][3])
    arguments["rewards"][3:] = 1e6
    assert torch.equal(value_targets(**arguments)[:3], targets[:3])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_an_irrelevant_step_holds_reaches_no_other_target(bad: float) -> None:
    arguments = random_arguments(mask=torch.ones(T, B, dtype=torch.bool))
    arguments["mask"][3:5, 1] = False
    before = value_targets(**arguments)
    for name in ("rewards", "discounts", "rhos", "cs"):
        arguments[name][3:5, 1] = bad
    torch.testing.assert_close(value_targets(**arguments), before, rtol=0, atol=0)
    arguments["values"][4, 1] = bad  # row 3 is what step 2 led to
    before[4, 1] = bad
    found = value_targets(**arguments)
    torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)


def test_trailing_dimensions_broadcast() -> None:
    values = torch.randn(T, B, 5)
    arguments = {
        "rewards": torch.randn(T, B, 5),
        "values": values,
        "bootstrap_value": torch.randn(B, 5),
        "discounts": torch.rand(T, B, 1),
    }
    targets = value_targets(**arguments)
    assert targets.shape == (T, B, 5)
    last = {name: value[..., -1] for name, value in arguments.items()}
    torch.testing.assert_close(targets[..., -1], value_targets(**last))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("bootstrap_value", (), r"bootstrap_value has shape \[\].*expected \[4\]"),
        ("bootstrap_value", (B, 1), r"bootstrap_value has shape \[4, 1\].*expected \[4\]"),
        ("rewards", (T + 1, B), r"rewards has shape \[8, 4\] but values has shape \[7, 4\]"),
        ("discounts", (T, 1), r"discounts has shape \[7, 1\] but values has shape \[7, 4\]"),
        ("rhos", (T, B, 1), r"rhos has shape \[7, 4, 1\] but values has shape \[7, 4\]"),
        ("mask", (B, T), r"mask has shape \[4, 7\] but values has shape \[7, 4\]"),
    ],
)
def test_a_wrong_shape_is_an_error_with_both_sides(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        value_targets(**random_arguments(**{name: torch.ones(shape)}))


def test_an_empty_rollout_is_an_error() -> None:
    empty = torch.zeros(0, B)
    with pytest.raises(ValueError, match="at least one step"):
        value_targets(rewards=empty, values=empty, discounts=empty, bootstrap_value=torch.zeros(B))


def test_targets_are_float32_without_a_graph_whatever_the_networks_are() -> None:
    arguments = random_arguments()
    arguments["values"] = arguments["values"].bfloat16().requires_grad_()
    targets = value_targets(**arguments)
    assert targets.dtype == torch.float32
    assert not targets.requires_grad


def gae_arguments(**overrides: Any) -> dict[str, Any]:
    """Random arguments of `gae`; column 0 ends at step 2, column 1 at step 4."""
    arguments = random_arguments()
    names = ("rewards", "values", "bootstrap_value", "discounts", "lambda_")
    return {**{name: arguments[name] for name in names}, **overrides}


def gae_by_definition(
    rewards: Any,
    values: Any,
    bootstrap_value: Any,
    discounts: Any,
    lambda_: float,
    mask: Any = None,
) -> np.ndarray:
    """Sum over l of (gamma lambda)^l delta, step by step, until an end or a masked step."""
    following = [*values[1:], bootstrap_value]
    advantages = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            weight = 1.0
            for s in range(t, T):
                if mask is not None and not mask[s, b]:
                    break
                delta = rewards[s, b] + discounts[s, b] * following[s][b] - values[s, b]
                advantages[t, b] += weight * delta
                weight *= discounts[s, b] * lambda_
    return advantages


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_gae_equals_the_sum_of_its_definition(lambda_: float, with_mask: bool) -> None:
    arguments = gae_arguments(lambda_=lambda_)
    if with_mask:
        arguments["mask"] = torch.rand(T, B) < 0.7
        assert 0 < arguments["mask"].sum() < T * B
    expected = gae_by_definition(**as_float64(arguments))
    np.testing.assert_allclose(gae(**arguments), expected, rtol=1e-4, atol=1e-5)


def test_gae_of_three_steps_is_what_one_computes_by_hand() -> None:
    """Gamma 0.5, lambda 0.5: errors 1 + 0.5 * 4 - 2 = 1, 2 + 0.5 * 6 - 4 = 1, 3 + 0.5 * 8 - 6 = 1.
    With an end after the second step that step's error is 2 - 4 = -2.
    """

    def advantages(*discounts: float) -> list[float]:
        found = gae(
            rewards=torch.tensor([[1.0], [2.0], [3.0]]),
            values=torch.tensor([[2.0], [4.0], [6.0]]),
            bootstrap_value=torch.tensor([8.0]),
            discounts=torch.tensor(discounts).unsqueeze(1),
            lambda_=0.5,
        )
        return list(found.squeeze(1).tolist())

    assert advantages(0.5, 0.5, 0.5) == [1 + 0.25 * 1.25, 1 + 0.25, 1.0]
    assert advantages(0.5, 0.0, 0.5) == [1 + 0.25 * -2.0, -2.0, 1.0]


def test_gae_with_lambda_1_is_the_discounted_return_minus_the_value() -> None:
    arguments = gae_arguments(lambda_=1.0)
    outcome = arguments["bootstrap_value"]
    for t in reversed(range(T)):
        outcome = arguments["rewards"][t] + arguments["discounts"][t] * outcome
        found = gae(**arguments)[t]
        torch.testing.assert_close(found, outcome - arguments["values"][t], rtol=1e-4, atol=1e-5)


def test_gae_with_lambda_0_is_the_error_of_one_step() -> None:
    arguments = gae_arguments(lambda_=0.0)
    values = arguments["values"]
    following = torch.cat([values[1:], arguments["bootstrap_value"][None]])
    errors = arguments["rewards"] + arguments["discounts"] * following - values
    torch.testing.assert_close(gae(**arguments), errors)


def test_values_plus_gae_are_the_targets_of_the_recursion() -> None:
    arguments = gae_arguments()
    torch.testing.assert_close(arguments["values"] + gae(**arguments), value_targets(**arguments))


def test_a_masked_step_has_no_advantage_whatever_it_holds() -> None:
    arguments = gae_arguments(mask=torch.ones(T, B, dtype=torch.bool))
    arguments["mask"][3:5, 1] = False
    before = gae(**arguments)
    assert not before[3:5, 1].any()
    for name in ("rewards", "discounts"):
        arguments[name][3:5, 1] = math.nan
    arguments["values"][4, 1] = math.nan
    torch.testing.assert_close(gae(**arguments), before, rtol=0, atol=0)


def test_gae_of_a_wrong_shape_is_an_error_with_both_sides() -> None:
    with pytest.raises(ValueError, match=r"mask has shape \[4, 7\] but values has shape \[7, 4\]"):
        gae(**gae_arguments(mask=torch.ones(B, T)))


def test_n_step_targets_of_four_steps_are_what_one_computes_by_hand() -> None:
    """Gamma 0.5. The second step ends an episode, and the third is not valid in the last case."""

    def targets(n: int, *discounts: float, valid: tuple[bool, ...] | None = None) -> list[float]:
        found = n_step_targets(
            rewards=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
            values=torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]]),
            discounts=torch.tensor(discounts).unsqueeze(1),
            n=n,
            mask=None if valid is None else torch.tensor(valid).unsqueeze(1),
        )
        return list(found.squeeze(1).tolist())

    every = (0.5,) * 4
    assert targets(1, *every) == [11.0, 17.0, 23.0, 29.0]
    assert targets(2, *every) == [2 + 7.5, 3.5 + 10, 5 + 12.5, 29.0]
    assert targets(9, *every)[0] == 1 + 1 + 0.75 + 0.5 + 50 / 16
    assert targets(2, 0.5, 0.0, 0.5, 0.5) == [2.0, 2.0, 5 + 12.5, 29.0]
    assert targets(3, *every, valid=(True, True, False, True)) == [2 + 7.5, 17.0, 30.0, 29.0]
