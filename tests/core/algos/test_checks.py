# SPDX-License-Identifier: Apache-2.0
"""Mistakes in losses are errors, instead of something else that is learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import impala
from torch import Tensor

from torchbeast.core import losses
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout

T, B = 5, 4
Make = Callable[..., Rollout]
RAW = torch.ones(T, B)


class Mine(IMPALA):
    """A user's algorithm, whose losses are those of IMPALA and others."""

    returned: Callable[[Losses], Any]

    def losses(self, minibatch: Rollout) -> Losses:
        found: Losses = type(self).returned(super().losses(minibatch))
        return found


def weight(found: Losses) -> Tensor:
    """Returns a scalar that depends on the weights."""
    return found.terms["pg_loss"]


def with_term(term: Callable[[Losses], Any]) -> Callable[[Losses], Any]:
    return lambda found: Losses({**found.terms, "my_loss": term(found)}, found.metrics)


def with_metric(metric: Any) -> Callable[[Losses], Any]:
    return lambda found: Losses(found.terms, {"my_metric": metric})


MISTAKES = {
    "a term for each step": (
        with_term(lambda found: weight(found) * RAW),
        r"Mine.losses: my_loss must be a scalar, got shape \[5, 4\]: take the sum",
    ),
    "a term with a dimension": (with_term(lambda found: weight(found)[None]), r"got shape \[1\]"),
    "a constant": (
        with_term(lambda found: weight(found).detach()),
        "Mine.losses: my_loss depends on no parameter: .* without detach",
    ),
    "a number": (with_metric(0.5), "my_metric must be a tensor, got 0.5"),
    "a metric for each step": (with_metric(RAW), "my_metric must be a scalar, got .* of a metric"),
}


def net() -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)


def learn(returned: Callable[[Losses], Any], make_rollout: Make) -> Any:
    step = impala(net(), type("Mine", (Mine,), {"returned": returned}))
    before = [parameter.clone() for parameter in step.algo.actor.parameters()]
    try:
        return step.update(make_rollout(T, B)).metrics
    finally:
        after = list(step.algo.actor.parameters())
        is_same = all(map(torch.equal, before, after))
        assert is_same == (step.counters.optimiser_steps == 0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_losses_that_would_be_minimised_in_another_way_are_refused(
    mistake: str, make_rollout: Make
) -> None:
    returned, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence):
        learn(returned, make_rollout)


def test_losses_without_a_mistake_are_learnt_from(make_rollout: Make) -> None:
    metrics = learn(with_metric(torch.tensor(2.0)), make_rollout)
    assert metrics["my_metric"] == 2.0
    assert learn(with_metric(losses.mean(RAW)), make_rollout)["my_metric"] == 1.0
    doubled = learn(with_term(weight), make_rollout)
    assert doubled["my_loss"] == doubled["pg_loss"] != 0
