# SPDX-License-Identifier: Apache-2.0
"""Schedules: their values, and how an algorithm trains with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learners import impala, ppo
from test_ppo import TinyNet
from torch import Tensor

from torchbeast.core.algos.config import (
    DQNConfig,
    IMPALAConfig,
    OptimiserConfig,
    PPOConfig,
    Schedule,
    Shape,
)
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import UsageError

T, B = 5, 4
Make = Callable[..., Rollout]


def square(share: float) -> float:
    return (1.0 - share) ** 2


@pytest.mark.parametrize(
    ("shape", "final", "values"),
    [
        ("constant", 0.0, [0.8, 0.8, 0.8, 0.8]),
        ("linear", 0.0, [0.8, 0.6, 0.4, 0.0]),
        ("linear", 0.2, [0.8, 0.65, 0.5, 0.2]),
        ("cosine", 0.2, [0.8, 0.2 + 0.3 * (1 + math.sqrt(0.5)), 0.5, 0.2]),
        (square, 0.0, [0.8, 0.45, 0.2, 0.0]),
        (f"{__name__}:square", 0.4, [0.8, 0.625, 0.5, 0.4]),
    ],
)
def test_values_at_the_start_a_quarter_half_and_the_end_are_those_of_the_formula(
    shape: Shape, final: float, values: list[float]
) -> None:
    schedule = Schedule(0.8, shape, final)
    assert [schedule.at(step, 100) for step in (0, 25, 50, 100)] == pytest.approx(values)
    assert schedule.at(150, 100) == schedule.at(100, 100), "it stays at its end"
    assert [schedule.at(40 + step, 140, 40) for step in (0, 25, 50, 100)] == pytest.approx(values)


@pytest.mark.parametrize("found", [-0.1, math.nan, math.inf, None, "1"])
def test_a_function_that_returns_no_share_is_an_error_that_names_it(found: Any) -> None:
    def broken(share: float) -> Any:
        return found

    with pytest.raises(UsageError, match=r"schedule .*broken must return a number .* fraction 0.5"):
        Schedule(1.0, broken).at(1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OptimiserConfig(learning_rate_schedule="step"),
            "learning_rate_schedule must be constant, linear, cosine, or a function .*got 'step'",
        ),
        (lambda: PPOConfig(final_clip_param=-1, clip_param_schedule="linear"), "final_clip_param"),
        (
            lambda: IMPALAConfig(final_entropy_cost=0.1),
            "final_entropy_cost 0.1 has no effect if entropy_cost_schedule is constant",
        ),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_off_policy_rates_are_constant_and_the_others_fall() -> None:
    assert DQNConfig().optimiser.learning_rate_schedule == "constant"
    assert PPOConfig().optimiser.learning_rate_schedule == "linear"


class Terms(PPO):
    """Notes the clip range and the entropy term of every minibatch."""

    def losses(self, minibatch: Rollout) -> Any:
        found = super().losses(minibatch)
        self.noted: list[tuple[float, Tensor]] = getattr(self, "noted", [])
        ratio = found.terms["entropy_loss"] / found.metrics["entropy"].total
        self.noted.append((self.config.clip_param, -ratio.detach() * minibatch.num_steps))
        return found


def test_losses_use_the_scheduled_settings_which_are_logged(make_rollout: Make) -> None:
    """Four updates to the end, of one minibatch each; the end itself is not learnt with."""
    step = ppo(
        TinyNet(),
        Terms,
        total_steps=4 * T * B,
        num_epochs=1,
        num_mini_batch=1,
        clip_param=0.3,
        clip_param_schedule="linear",
        final_clip_param=0.1,
        entropy_cost=0.2,
        entropy_cost_schedule="cosine",
        learning_rate_schedule="constant",
    )
    rows = [step.update(make_rollout(T, B)).metrics for _ in range(4)]
    clips, costs = [0.3, 0.25, 0.2, 0.15], [0.1 * (1 + math.cos(i * math.pi / 4)) for i in range(4)]
    assert [row["clip_param"] for row in rows] == pytest.approx(clips)
    assert [row["entropy_cost"] for row in rows] == pytest.approx(costs)
    assert isinstance(step.algo, Terms)
    assert [clip for clip, _ in step.algo.noted] == pytest.approx(clips)
    assert [float(cost) for _, cost in step.algo.noted] == pytest.approx(costs)
    assert len({row["learning_rate"] for row in rows}) == 1
    assert step.algo.config.clip_param == pytest.approx(0.1), "at the end"


def test_a_setting_that_does_not_change_is_not_logged(make_rollout: Make) -> None:
    metrics = impala(TinyNet(), total_steps=100).update(make_rollout(T, B)).metrics
    assert "entropy_cost" not in metrics and "learning_rate" in metrics


def test_each_group_of_parameters_keeps_its_part_of_the_rate(make_rollout: Make) -> None:
    """As in an algorithm that makes an optimiser with another rate for some of its layers."""

    class TwoRates(PPO):
        def __init__(self, actor: Any, config: Any) -> None:
            super().__init__(actor, config)
            heads = torch.nn.ModuleList([actor.policy, actor.baseline])
            groups = [
                {"params": head.parameters(), "lr": rate}
                for head, rate in zip(heads, (0.4, 0.04), strict=True)
            ]
            self.optimisers = {"actor": torch.optim.SGD(groups)}

    step = ppo(
        TinyNet(),
        TwoRates,
        total_steps=2 * T * B,
        learning_rate=0.4,
        final_learning_rate=0.2,
        num_epochs=1,
        num_mini_batch=1,
    )
    step.update(make_rollout(T, B))
    groups = step.algo.optimisers["actor"].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.3, 0.03])


def test_a_restarted_schedule_begins_at_its_step_and_survives_a_checkpoint(
    make_rollout: Make,
) -> None:
    settings = {"total_steps": 4 * T * B, "learning_rate": 0.8}
    first, other = impala(TinyNet(), **settings), impala(TinyNet(), **settings)
    first.update(make_rollout(T, B))
    first.restart_schedules(["learning_rate"])
    first.update(make_rollout(T, B))
    other.load_state_dict(first.state_dict())
    rates = [each.algo.optimisers["actor"].param_groups[0]["lr"] for each in (first, other)]
    assert rates == pytest.approx([0.8 * 2 / 3] * 2)


@dataclasses.dataclass
class Drop:
    """Has no hash, as every dataclass that is not frozen."""

    at: float

    def __call__(self, share: float) -> float:
        return 1.0 if share < self.at else 0.1


def test_a_schedule_may_be_an_object_without_a_hash() -> None:
    schedule = Schedule(0.8, Drop(0.5))
    assert [schedule.at(step, 100) for step in (0, 50)] == pytest.approx([0.8, 0.08])
    assert schedule.ending(1000) == f"{__name__}:Drop until step 1,000"
