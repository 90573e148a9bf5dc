# SPDX-License-Identifier: Apache-2.0
"""Steps that are not valid are not learnt from, and the others bootstrap before them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import impala

from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update import saving

T, B = 5, 3
Make = Callable[..., Rollout]


class Means(IMPALA):
    """A variant whose terms are means over the steps."""

    reduction = "mean"


def mlp() -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)


def masked(rollout: Rollout, *invalid: tuple[int, int]) -> Rollout:
    """invalid: rows that the steps lead to, and columns."""
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    for row, column in invalid:
        valid[row, column] = False
    return dataclasses.replace(rollout, valid=valid)


def gradients(actor: MLPNet, kind: type[IMPALA], rollout: Rollout) -> dict[str, Any]:
    step = impala(copy.deepcopy(actor), kind, total_steps=10**9)
    step.update(rollout)
    return {name: p.grad for name, p in step.algo.actor.named_parameters()}


@pytest.mark.parametrize("kind", [IMPALA, Means])
def test_all_steps_valid_is_bit_equal_to_no_mask(make_rollout: Make, kind: type[IMPALA]) -> None:
    actor, rollout = mlp(), make_rollout(T, B, truncated=[(2, 0)])
    some, every = gradients(actor, kind, masked(rollout)), gradients(actor, kind, rollout)
    torch.testing.assert_close(some, every, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [IMPALA, Means])
def test_a_column_that_is_nowhere_valid_might_as_well_not_be_there(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    actor, rollout = mlp(), make_rollout(T, B)
    here = masked(rollout, *((row, B - 1) for row in range(T + 1)))
    others = rollout.split(1)[:-1]
    terms = impala(actor, kind).algo.losses(here).terms
    apart = [impala(actor, kind).algo.losses(other).terms for other in others]
    for name, loss in terms.items():
        expected = torch.stack([part[name] for part in apart])
        joined = expected.sum() if kind is IMPALA else expected.mean()
        torch.testing.assert_close(loss, joined)
    assert (here.num_steps, here.env_steps) == (T * (B - 1), T * B), "learnt from, and collected"


def test_the_return_stops_at_a_step_that_is_not_valid_and_bootstraps_there(
    make_rollout: Make,
) -> None:
    """Steps 0 and 1 are learnt as from a rollout that ends where the invalid step 2 begins."""
    actor, rollout = mlp(), make_rollout(T, B)
    cut = rollout.map(lambda leaf: leaf[:3] if leaf.dim() > 1 and len(leaf) == T + 1 else leaf)
    rest = masked(rollout, *((row, column) for row in (3, 4, 5) for column in range(B)))
    torch.testing.assert_close(
        impala(actor).algo.losses(rest).terms, impala(actor).algo.losses(cut).terms
    )
    middle = masked(rollout, *((3, column) for column in range(B)))
    before = impala(actor).algo.losses(middle).terms
    middle.extras["policy_logits"][3] += torch.randn(B, 3)  # of the step that is not valid
    torch.testing.assert_close(impala(actor).algo.losses(middle).terms, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [IMPALA, Means])
def test_slices_of_a_masked_batch_are_learnt_as_the_whole(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    rollout = masked(
        make_rollout(T, B), (1, 0), (2, 0), (3, 1), *((row, 2) for row in range(T + 1))
    )
    whole, parts = impala(mlp(), kind), impala(mlp(), kind, bytes_at_once=1)
    parts.algo.actor.load_state_dict(whole.algo.actor.state_dict())
    assert parts.update(rollout).metrics == pytest.approx(
        whole.update(rollout).metrics, rel=1e-4, abs=1e-6
    )
    assert parts.counters.learnt_steps == rollout.num_steps == 2 * T - 3


@pytest.mark.parametrize("kind", [IMPALA, Means])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("recurrent", [False, True])
def test_what_a_step_holds_that_is_not_valid_reaches_no_gradient(
    make_rollout: Make, kind: type[IMPALA], bad: float, recurrent: bool
) -> None:
    """The network reads observation and reward of the row that the step leads to."""
    net = MLPNet(ArraySpec((4,), "float32"), Discrete(3), recurrent)
    state = net.initial_state(B)
    rollout = masked(make_rollout(T, B, truncated=[(4, 0)], state=state), (3, 0), (4, 0), (1, 2))
    valid = rollout.valid
    assert valid is not None

    def holding(value: float) -> Rollout:
        return dataclasses.replace(
            rollout,
            reward=rollout.reward.where(valid, value),
            observation=rollout.observation.where(valid[..., None], value),
            extras={
                "policy_logits": rollout.extras["policy_logits"].where(valid[..., None], value)
            },
        )

    found = gradients(net, kind, holding(bad))
    assert all(gradient.isfinite().all() for gradient in found.values())
    torch.testing.assert_close(found, gradients(net, kind, holding(0.0)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [IMPALA, Means])
def test_a_batch_without_a_valid_step_changes_nothing_but_is_counted(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    """Nor does the momentum of earlier steps."""
    step = impala(mlp(), kind, momentum=0.9)
    step.update(make_rollout(T, B))
    before = copy.deepcopy(saving.state_of(step.algo))
    step.update(masked(make_rollout(T, B), *((row, b) for row in range(T + 1) for b in range(B))))
    torch.testing.assert_close(
        saving.state_of(step.algo)["model_state_dict"], before["model_state_dict"], rtol=0, atol=0
    )
    state = saving.state_of(step.algo)["optimizer_state_dict"]["state"]
    torch.testing.assert_close(state, before["optimizer_state_dict"]["state"], rtol=0, atol=0)
    counters = step.counters
    assert (counters.version, counters.optimiser_steps) == (2, 1)
    assert (counters.env_steps, counters.learnt_steps) == (2 * T * B, T * B)
