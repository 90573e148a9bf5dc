# SPDX-License-Identifier: Apache-2.0
"""Every way to spread the work that a scheme accepts learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray_clusters import callers_ray
from scheme_docs import AXES, STORAGES, combinations

from torchbeast import Learner
from torchbeast.schemes import Scheme

ACCEPTED = [(values, made) for values, made in combinations() if isinstance(made, Scheme)]


@pytest.fixture(scope="module")
def on_ray() -> Any:
    pytest.importorskip("ray")
    with callers_ray(num_cpus=8):
        yield


def cases() -> list[Any]:
    """The combinations that are accepted.

    Long tests run those on Ray, those with the most processes, and those that other files run.
    """
    return [
        pytest.param(scheme, id="-".join(map(str, values)), marks=marks_of(scheme))
        for values, scheme in ACCEPTED
    ]


def marks_of(scheme: Scheme) -> list[Any]:
    many = scheme.col_remote_workers and scheme.grad_remote_workers
    is_on_ray = "ray" in (scheme.col_backend, scheme.grad_backend)
    if scheme.grad_remote_workers:
        has_other_test = scheme.grad_communication == "synchronous"
    else:
        has_other_test = scheme.is_synchronous or not scheme.learns_from_transitions
        has_other_test = has_other_test and scheme.col_remote_workers > 0
    return [pytest.mark.long] if many or is_on_ray or has_other_test else []


def test_there_are_combinations_along_every_axis() -> None:
    for index, values in enumerate(AXES.values()):
        assert {found[index] for found, _ in ACCEPTED} == set(values)
    assert len(ACCEPTED) > 20


def test_a_combination_that_is_refused_names_both_parts() -> None:
    sentences = {str(made) for _, made in combinations() if not isinstance(made, Scheme)}
    assert len(sentences) > 8
    for sentence in sentences:
        assert sum(name in sentence for name in [*AXES, *STORAGES]) >= 2, sentence


@pytest.mark.parametrize("scheme", cases())
def test_a_combination_changes_the_weights_with_a_bounded_lag(
    scheme: Scheme, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if scheme.inference == "central":
        pytest.importorskip("libtorchbeast", exc_type=ImportError)
    if "ray" in (scheme.col_backend, scheme.grad_backend):
        request.getfixturevalue("on_ray")
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        before = {name: weights.clone() for name, weights in learner.actor.state_dict().items()}
        lags = [learner.step().get("max_lag", 0) for _ in range(4)]
        after = learner.actor.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    waits = scheme.is_synchronous and scheme.grad_communication == "synchronous"
    assert max(lags) <= (0 if waits else 40), "slots and max_lag bound it"
