# SPDX-License-Identifier: Apache-2.0
"""V-trace against its definition and golden cases (run this file to rewrite them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchbeast.core import vtrace

GOLDEN = Path(__file__).parent.parent / "golden" / "vtrace.json"
T, B, ACTIONS = 6, 4, 3


def by_definition(
    log_rhos: np.ndarray,
    discounts: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap_value: np.ndarray,
    clip_rho_threshold: float | None,
    clip_pg_rho_threshold: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """vs and pg_advantages by the paper's sum, in float64: slow and close to its notation."""
    steps = len(rewards)
    rhos = np.exp(log_rhos)
    cs = np.minimum(rhos, 1.0)
    clipped_rhos = rhos if clip_rho_threshold is None else np.minimum(rhos, clip_rho_threshold)
    pg_rhos = rhos if clip_pg_rho_threshold is None else np.minimum(rhos, clip_pg_rho_threshold)
    values_t_plus_1 = np.concatenate([values[1:], bootstrap_value[None]])
    vs = np.copy(values)
    for t in range(steps):
        for s in range(t, steps):
            trace = np.prod(discounts[t:s], axis=0) * np.prod(cs[t:s], axis=0)
            error = rewards[s] + discounts[s] * values_t_plus_1[s] - values[s]
            vs[t] += trace * clipped_rhos[s] * error
    vs_t_plus_1 = np.concatenate([vs[1:], bootstrap_value[None]])
    return vs, pg_rhos * (rewards + discounts * vs_t_plus_1 - values)


def random_case(seed: int) -> dict[str, np.ndarray]:
    """Log-ratios on both sides of every clip of CLIPS, and episodes that end."""
    rng = np.random.default_rng(seed)
    log_rhos = rng.uniform(-2.5, 2.5, (T, B))
    log_rhos[0], log_rhos[-1] = (-2.4, -0.2, 0.5, 2.3), (2.3, 0.5, -0.2, -2.4)
    discounts = np.full((T, B), 0.97)
    discounts[2, 0] = discounts[0, 1] = discounts[5, 2] = 0.0
    return {
        "log_rhos": log_rhos,
        "discounts": discounts,
        "rewards": rng.normal(size=(T, B)),
        "values": rng.normal(size=(T, B)),
        "bootstrap_value": rng.normal(size=B),
    }


CLIPS: list[tuple[float | None, float | None]] = [
    (1.0, 1.0),
    (2.0, 1.5),
    (3.7, 2.2),
    (0.5, 0.7),
    (None, None),
    (1.0, None),
]


def tensors(case: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in case.items()}


def on_policy_case() -> dict[str, torch.Tensor]:
    case = tensors(random_case(3))
    return {**case, "log_rhos": torch.zeros(T, B)}


@pytest.mark.parametrize("clips", CLIPS)
def test_vtrace_equals_the_sum_of_its_definition(clips: tuple[float | None, float | None]) -> None:
    case = random_case(0)
    rhos = np.exp(case["log_rhos"])
    for clip in (1.0, *clips):
        assert clip is None or ((rhos < clip).any() and (rhos > clip).any())
    expected = by_definition(**case, clip_rho_threshold=clips[0], clip_pg_rho_threshold=clips[1])
    result = vtrace.from_importance_weights(
        **tensors(case), clip_rho_threshold=clips[0], clip_pg_rho_threshold=clips[1]
    )
    np.testing.assert_allclose(result.vs, expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.pg_advantages, expected[1], rtol=1e-4, atol=1e-4)


def test_golden_cases_are_reproduced() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert len(golden["cases"]) == len(CLIPS)
    for case in golden["cases"]:
        inputs = {name: torch.tensor(value) for name, value in case["inputs"].items()}
        result = vtrace.from_importance_weights(**inputs, **case["settings"])
        torch.testing.assert_close(result.vs, torch.tensor(case["vs"]), rtol=1e-4, atol=1e-4)
        expected = torch.tensor(case["pg_advantages"])
        torch.testing.assert_close(result.pg_advantages, expected, rtol=1e-4, atol=1e-4)


def test_on_policy_targets_are_discounted_returns() -> None:
    case = on_policy_case()
    expected = case["bootstrap_value"]
    result = vtrace.from_importance_weights(**case)
    for t in reversed(range(T)):
        expected = case["rewards"][t] + case["discounts"][t] * expected
        torch.testing.assert_close(result.vs[t], expected)


def test_on_policy_advantages_are_returns_minus_values() -> None:
    case = on_policy_case()
    result = vtrace.from_importance_weights(**case)
    torch.testing.assert_close(result.pg_advantages, result.vs - case["values"])


def test_nothing_leaks_past_the_end_of_an_episode() -> None:
    case = tensors(random_case(1))
    end = 2  # the discount of column 0 is 0 there
    before = vtrace.from_importance_weights(**case)
    for name in ("rewards", "values", "log_rhos", "discounts"):
        case[name][end + 1 :, 0] = 3.0
    case["bootstrap_value"][0] = -1e6
    after = vtrace.from_importance_weights(**case)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[: end + 1, 0], b[: end + 1, 0])
        assert not torch.equal(a[end + 1 :, 0], b[end + 1 :, 0])


def test_thresholds_may_be_tensors_without_dimensions() -> None:
    case = tensors(random_case(2))
    numbers = vtrace.from_importance_weights(**case, clip_rho_threshold=3.7)
    as_tensor = vtrace.from_importance_weights(**case, clip_rho_threshold=torch.tensor(3.7))
    assert torch.equal(numbers.vs, as_tensor.vs)


def test_the_trace_stays_clipped_at_1_without_thresholds() -> None:
    case = tensors(random_case(2))
    case["log_rhos"][:] = 1.0
    doubled = {**case, "log_rhos": case["log_rhos"] + np.log(2.0)}
    once, twice = (
        vtrace.from_importance_weights(**c, clip_rho_threshold=None, clip_pg_rho_threshold=None)
        for c in (case, doubled)
    )
    torch.testing.assert_close(twice.vs - case["values"], 2 * (once.vs - case["values"]))


def test_trailing_dimensions_broadcast() -> None:
    result = vtrace.from_importance_weights(
        log_rhos=torch.zeros(T, B, 1),
        discounts=torch.rand(T, B, 1),
        rewards=torch.randn(T, B, 42),
        values=torch.randn(T, B, 42),
        bootstrap_value=torch.randn(B, 42),
    )
    assert result.vs.shape == result.pg_advantages.shape == (T, B, 42)


def test_a_bootstrap_value_of_wrong_rank_is_an_error() -> None:
    case = tensors(random_case(2))
    case["bootstrap_value"] = torch.zeros(B, 1)
    with pytest.raises(ValueError, match=r"bootstrap_value has shape \[4, 1\].*expected \[4\]"):
        vtrace.from_importance_weights(**case)


@pytest.mark.parametrize("name", ["log_rhos", "discounts", "rewards"])
def test_a_shape_mismatch_is_an_error_with_both_sides(name: str) -> None:
    case = tensors(random_case(2))
    case[name] = case[name][:-1]
    said = rf"^{name.removeprefix('log_')} has shape \[5, 4\].*values has shape \[6, 4\]"
    with pytest.raises(ValueError, match=said):
        vtrace.from_importance_weights(**case)


def logits_case() -> dict[str, torch.Tensor]:
    case = tensors(random_case(4))
    del case["log_rhos"]
    return {
        **case,
        "behavior_policy_logits": torch.randn(T, B, ACTIONS),
        "target_policy_logits": torch.randn(T, B, ACTIONS),
        "actions": torch.randint(ACTIONS, (T, B)),
    }


def test_from_logits_is_from_importance_weights_of_its_log_ratios() -> None:
    case = logits_case()
    result = vtrace.from_logits(**case)
    behavior = vtrace.action_log_probs(case["behavior_policy_logits"], case["actions"])
    target = vtrace.action_log_probs(case["target_policy_logits"], case["actions"])
    assert torch.equal(result.behavior_action_log_probs, behavior)
    assert torch.equal(result.target_action_log_probs, target)
    assert torch.equal(result.log_rhos, target - behavior)
    rest = {name: case[name] for name in ("discounts", "rewards", "values", "bootstrap_value")}
    expected = vtrace.from_importance_weights(log_rhos=target - behavior, **rest)
    assert torch.equal(result.vs, expected.vs)
    assert torch.equal(result.pg_advantages, expected.pg_advantages)


def test_a_constant_added_to_logits_changes_nothing() -> None:
    case = logits_case()
    shifted = {**case, "target_policy_logits": case["target_policy_logits"] + 5.0}
    for a, b in zip(vtrace.from_logits(**case), vtrace.from_logits(**shifted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_action_log_probs_are_those_of_the_softmax() -> None:
    logits, actions = torch.randn(T, B, ACTIONS), torch.randint(ACTIONS, (T, B))
    result = vtrace.action_log_probs(logits, actions)
    for t in range(T):
        for b in range(B):
            expected = logits[t, b].softmax(-1)[actions[t, b]].log()
            torch.testing.assert_close(result[t, b], expected)


def test_results_are_float32_without_a_graph_whatever_the_networks_are() -> None:
    case = logits_case()
    case["values"] = case["values"].bfloat16().requires_grad_()
    case["target_policy_logits"] = case["target_policy_logits"].bfloat16().requires_grad_()
    for tensor in vtrace.from_logits(**case):
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_masked_step_holds_reaches_no_result(bad: float) -> None:
    case = tensors(random_case(0))
    mask = torch.ones_like(case["rewards"], dtype=torch.bool)
    mask[2, 1] = False
    before = vtrace.from_importance_weights(**case, mask=mask)
    for name in ("log_rhos", "rewards", "discounts"):
        case[name][2, 1] = bad
    found = vtrace.from_importance_weights(**case, mask=mask)
    torch.testing.assert_close(found, before, rtol=0, atol=0)
    assert found.pg_advantages[2, 1] == 0


def golden_cases() -> list[dict[str, Any]]:
    cases = []
    for seed, (rho, pg_rho) in enumerate(CLIPS):
        inputs = random_case(seed)
        settings = {"clip_rho_threshold": rho, "clip_pg_rho_threshold": pg_rho}
        vs, advantages = by_definition(**inputs, **settings)
        results = {"vs": vs.tolist(), "pg_advantages": advantages.tolist()}
        lists = {name: value.tolist() for name, value in inputs.items()}
        cases.append({"settings": settings, "inputs": lists, **results})
    return cases


def write_golden() -> None:
    recipe = "python tests/core/test_vtrace.py: by_definition of random_case(i), float64"
    GOLDEN.write_text(json.dumps({"recipe": recipe, "cases": golden_cases()}, indent=1) + "\n")


if __name__ == "__main__":
    write_golden()
