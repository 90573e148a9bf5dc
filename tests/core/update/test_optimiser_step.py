# SPDX-License-Identifier: Apache-2.0
"""Minibatches, epochs, ranks, and what is counted of them."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from learners import impala, ppo
from torch import Tensor

from torchbeast.core import losses
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import UsageError

T, B, ACTIONS = 5, 4, 3
TIMEOUT_S = 30.0
Make = Callable[..., Rollout]


class Epochs(IMPALA):
    """Learns twice from each half of a batch, as PPO does, with rewards made smaller first."""

    prepared = steps = 0

    def prepare(self, batch: Rollout) -> Rollout:
        assert not torch.is_grad_enabled()
        self.prepared += 1
        return dataclasses.replace(batch, reward=0.1 * batch.reward)

    def observe(self, batch: Rollout) -> None:
        assert not torch.is_grad_enabled()
        super().observe(batch)

    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        for _ in range(2):
            yield from batch.split(B // 2)

    def after_step(self) -> None:
        assert not torch.is_grad_enabled()
        self.steps += 1


def mlp() -> MLPNet:
    unbounded = ArraySpec((4,), "float32", -math.inf, math.inf)
    return MLPNet(unbounded, Discrete(ACTIONS), False)


def weights(step: OptimiserStep[Any]) -> dict[str, Tensor]:
    return copy.deepcopy(dict(step.algo.actor.named_parameters()))


def buffers(step: OptimiserStep[Any]) -> dict[str, Tensor]:
    return copy.deepcopy(dict(step.algo.actor.named_buffers()))


def test_steps_that_are_learnt_again_count_as_learnt_and_not_as_collected(
    make_rollout: Make,
) -> None:
    step: Any = impala(mlp(), Epochs, total_steps=4 * T * B, learning_rate=0.1)
    rates = [step.update(make_rollout(T, B)).metrics["learning_rate"] for _ in range(3)]
    counters = step.counters
    assert (counters.env_steps, counters.learnt_steps) == (3 * T * B, 3 * 2 * T * B)
    assert (counters.optimiser_steps, counters.version) == (3 * 4, 3)
    assert rates == pytest.approx([0.1, 0.075, 0.05])
    assert (step.algo.prepared, step.algo.steps) == (3, 3 * 4)


def test_minibatches_are_updates_one_after_another(make_rollout: Make) -> None:
    """But for the statistics of observations, which count the batch once and before all."""
    once: Any = impala(mlp(), Epochs)
    one_by_one: Any = impala(copy.deepcopy(once.algo.actor), total_steps=10**12)
    batch = make_rollout(T, B)
    metrics = once.update(batch).metrics
    actor = one_by_one.algo.actor
    actor.observe(batch.observation[1:])
    actor.observe = lambda observation: None
    smaller = dataclasses.replace(batch, reward=0.1 * batch.reward)
    losses = [
        one_by_one.update(half).metrics["total_loss"]
        for _ in range(2)
        for half in smaller.split(B // 2)
    ]
    assert metrics["total_loss"] == pytest.approx(sum(losses) / 4)
    torch.testing.assert_close(weights(once), weights(one_by_one))
    assert buffers(once)["scale.count"] == T * B


def test_steps_above_max_lag_are_not_learnt_from_but_count_as_collected(make_rollout: Make) -> None:
    """The gradient of a sum over all columns is that of the recent columns alone."""
    limited = impala(mlp(), max_lag=3)
    recent_alone = impala(copy.deepcopy(limited.algo.actor))
    for step in (limited, recent_alone):
        step.counters.version = 10
        step.algo.actor.observe = lambda observation: None  # type: ignore[method-assign]
    batch = make_rollout(T, B, policy_version=torch.tensor([6, 7, 0, 9]).expand(T + 1, B))
    metrics = limited.update(batch).metrics
    recent_alone.update(batch.take(torch.tensor([1, 3])))
    torch.testing.assert_close(weights(limited), weights(recent_alone))
    assert metrics["too_old_share"] == 0.5
    assert limited.counters.env_steps == T * B
    assert limited.counters.learnt_steps == T * B // 2


def test_updates_without_a_step_do_not_make_later_batches_too_old(make_rollout: Make) -> None:
    """The weights stay the same in between, so a steady lag of 5 leaves every third batch."""
    step = impala(mlp(), max_lag=3)
    shares = []
    for version in range(30):
        acted = torch.full((T + 1, B), max(0, version - 5))
        metrics = step.update(make_rollout(T, B, policy_version=acted)).metrics
        shares.append(metrics["too_old_share"])
    assert shares[:4] == [0.0] * 4 and shares[4] == 1.0
    assert shares[-12:].count(0.0) == 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [impala, ppo])
def test_a_batch_whose_steps_are_all_too_old_changes_no_weight(
    make_rollout: Make, make: Any
) -> None:
    step = make(mlp(), max_lag=3)
    step.counters.version = 10
    before = weights(step)
    assert step.update(make_rollout(T, B)).metrics["too_old_share"] == 1.0  # of version 0
    torch.testing.assert_close(weights(step), before, rtol=0, atol=0)
    assert step.counters.env_steps == T * B and step.counters.learnt_steps == 0


def test_replayed_steps_have_no_max_lag(make_rollout: Make) -> None:
    replayed = torch.tensor([True, True, False, False]).expand(T + 1, B)
    versions = torch.tensor([0, 9, 0, 9]).expand(T + 1, B)
    recent, share = make_rollout(T, B, policy_version=versions, replayed=replayed).without_older(5)
    assert recent.valid is not None and recent.valid[1:].all(0).tolist() == [1, 1, 0, 1]
    assert recent.env_steps == 2 * T and share.total / share.steps == 0.5


def test_max_lag_is_refused_where_steps_of_any_age_are_learnt_from() -> None:
    class OffPolicy(IMPALA):
        takes = Transitions

    class Windows(IMPALA):
        burns_in = True

    with pytest.raises(UsageError, match="Windows trains on replayed steps of any age"):
        impala(mlp(), Windows, max_lag=3)
    with pytest.raises(UsageError, match="OffPolicy trains on replayed steps of any age"):
        impala(mlp(), OffPolicy, max_lag=3)


class GoesBad(Epochs):
    """The third minibatch has a reward that is no number."""

    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        for number, half in enumerate(super().minibatches(batch)):
            reward = half.reward * (math.nan if number == 2 else 1.0)
            yield dataclasses.replace(half, reward=reward)


def test_a_bad_minibatch_touches_no_weight_and_counts_as_nothing(make_rollout: Make) -> None:
    bad: Any = impala(mlp(), GoesBad)
    seen: list[dict[str, Tensor]] = []
    after_step = bad.algo.after_step
    bad.algo.after_step = lambda: (after_step(), seen.append(weights(bad)))
    before = buffers(bad)
    with pytest.raises(NonFiniteError, match="is nan in optimiser step 2"):
        bad.update(make_rollout(T, B))
    assert len(seen) == 2
    torch.testing.assert_close(weights(bad), seen[-1], rtol=0, atol=0)
    torch.testing.assert_close(buffers(bad), before, rtol=0, atol=0)
    counters = bad.counters
    assert (counters.env_steps, counters.version) == (0, 0)
    assert (counters.optimiser_steps, counters.learnt_steps) == (2, T * B)


class StopsEarly(Epochs):
    """Has enough after the third of its four minibatches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[dict[str, float]] = []

    def stops_after(self, metrics: Any) -> bool:
        self.seen.append(metrics)
        return len(self.seen) == 3


def test_the_rest_of_the_minibatches_is_left_out_where_the_algorithm_says_so(
    make_rollout: Make,
) -> None:
    step: Any = impala(mlp(), StopsEarly)
    total = step.update(make_rollout(T, B)).metrics["total_loss"]
    losses = [metrics["total_loss"] for metrics in step.algo.seen]
    assert len(losses) == 3 and total == pytest.approx(sum(losses) / 3)
    assert {"pg_loss", "entropy", "grad_norm"} <= set(step.algo.seen[0])
    counters = step.counters
    assert (counters.optimiser_steps, counters.learnt_steps) == (3, 3 * T * B // 2)
    assert (counters.env_steps, counters.version) == (T * B, 1)


class MeasuresBatches(Epochs):
    """Reports metrics of the prepared batch: a mean, one of some steps, one of none."""

    def metrics(self, batch: Rollout) -> Any:
        assert not torch.is_grad_enabled() and self.prepared == 1 and self.steps == 0
        rewards = batch.reward[1:]
        return {
            "reward": rewards.mean(),
            "positive": losses.mean(rewards, rewards > 0),
            "none": losses.mean(rewards, rewards > math.inf),
        }


def test_metrics_of_a_batch_are_computed_once_from_what_was_prepared(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    rewards = 0.1 * rollout.reward[1:]
    metrics = impala(mlp(), MeasuresBatches).update(rollout).metrics
    assert metrics["reward"] == pytest.approx(rewards.mean().item())
    assert metrics["positive"] == pytest.approx(rewards[rewards > 0].mean().item())
    assert "none" not in metrics and metrics["entropy"] > 0


class OnlyWithSteps(Epochs):
    """Has a metric that is no Mean, and stops after the first minibatch with steps."""

    reduction = "mean"

    def losses(self, minibatch: Rollout) -> Any:
        found = super().losses(minibatch)
        return found._replace(metrics={**found.metrics, "one": torch.ones(())})

    def stops_after(self, metrics: Mapping[str, float]) -> bool:
        return metrics["one"] > 0


def test_a_minibatch_without_a_valid_step_does_not_count_in_the_metrics(make_rollout: Make) -> None:
    """Without a half of the columns, the metrics are the other half's: the second minibatch's."""
    batch = make_rollout(T, B)
    right = torch.arange(B).expand(T + 1, B) >= B // 2
    step = impala(mlp(), OnlyWithSteps)
    alone = impala(copy.deepcopy(step.algo.actor), OnlyWithSteps)
    for each in (step, alone):
        each.algo.actor.observe = lambda observation: None  # type: ignore[method-assign]
    metrics = step.update(dataclasses.replace(batch, valid=right)).metrics
    assert metrics["one"] == 1.0
    assert metrics == pytest.approx(alone.update(batch.columns(B // 2, B)).metrics)
    nothing = dataclasses.replace(batch, valid=torch.zeros_like(right))
    assert [*step.update(nothing).metrics] == ["learning_rate"]


@pytest.mark.parametrize(
    "optimiser",
    [{"momentum": 0.9}, {"optimiser": "adamw", "weight_decay": 0.5}],
    ids=["momentum", "weight decay"],
)
def test_a_layer_keeps_its_values_exactly_while_it_is_frozen(
    optimiser: dict[str, Any], make_rollout: Make
) -> None:
    step, batch = impala(mlp(), learning_rate=0.01, **optimiser), make_rollout(T, B)
    layers = dict(step.algo.actor.named_children())
    no_value = {"torso", "fc", "baseline"}  # that the baseline's loss depends on
    for frozen in (set(), {"fc"}, no_value, {"policy"}, set()):
        for name, layer in layers.items():
            layer.requires_grad_(name not in frozen)
        before = weights(step)
        assert math.isfinite(step.update(batch).metrics["grad_norm"])
        moved = {name for name, now in weights(step).items() if not torch.equal(now, before[name])}
        assert moved == {name for name in before if name.split(".")[0] not in frozen}
    step.algo.actor.requires_grad_(False)
    before = weights(step)
    step.update(batch)
    assert all(torch.equal(now, before[name]) for name, now in weights(step).items())


class Empty(IMPALA):
    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        return []


def test_an_update_without_minibatches_is_a_sentence(make_rollout: Make) -> None:
    with pytest.raises(ValueError, match=r"minibatches\(\) yielded none"):
        impala(mlp(), Empty).update(make_rollout(T, B))


class Recording(IMPALA):
    """Remembers how many columns each backward had, and in which thread."""

    def losses(self, minibatch: Rollout) -> Losses:
        seen = self.__dict__.setdefault("seen", set())
        seen.add((minibatch.batch_size, threading.current_thread()))
        return super().losses(minibatch)


class WholeNet(MLPNet):
    """Does not say that its columns are on their own."""

    separable = False


class WholeLoss(Recording):
    separable = False


@pytest.mark.parametrize(("net", "kind"), [(WholeNet, Recording), (MLPNet, WholeLoss)])
def test_a_batch_is_learnt_whole_unless_network_and_algorithm_let_it_be_cut(
    make_rollout: Make, net: type[MLPNet], kind: type[IMPALA]
) -> None:
    actor = net(ArraySpec((4,), "float32"), Discrete(ACTIONS), False)
    step: Any = impala(actor, kind, bytes_at_once=1, num_threads=3)
    step.update(make_rollout(T, B))
    assert step.algo.seen == {(B, threading.current_thread())}
    cut: Any = impala(mlp(), Recording, bytes_at_once=1)
    cut.update(make_rollout(T, B))
    assert cut.algo.seen == {(1, threading.current_thread())}


class MeasuresSomeSteps(IMPALA):
    """Reports a figure of positive rewards, one of all steps, and one of none."""

    def losses(self, minibatch: Rollout) -> Losses:
        rewards = minibatch.reward[1:]
        metrics = {
            "positive": losses.mean(rewards, rewards > 0),
            "all": rewards.mean(),
            "none": losses.mean(rewards, rewards > math.inf),
        }
        return Losses(super().losses(minibatch).terms, metrics)


@pytest.mark.parametrize("bytes_at_once", [None, 1])
def test_a_metric_of_some_steps_is_their_mean_and_left_out_where_there_are_none(
    make_rollout: Make, bytes_at_once: int | None
) -> None:
    """Some columns have no positive reward, and the first is one of them."""
    rollout = make_rollout(T, B)
    rollout.reward[:, 0] = -1.0
    rewards = rollout.reward[1:]
    step = impala(mlp(), MeasuresSomeSteps, bytes_at_once=bytes_at_once)
    metrics = step.update(rollout).metrics
    assert metrics["positive"] == pytest.approx(rewards[rewards > 0].mean().item())
    assert metrics["all"] == pytest.approx(rewards.mean().item())
    assert not [name for name in metrics if "none" in name or "steps of" in name]


class MeasuresByHalves(MeasuresSomeSteps):
    """Learns from one half of the columns after the other."""

    def minibatches(self, batch: Rollout) -> Iterable[Rollout]:
        return batch.split(B // 2)


def test_a_metric_is_the_mean_over_the_minibatches_that_have_it(make_rollout: Make) -> None:
    rollout = make_rollout(T, B)
    rollout.reward[:, : B // 2] = -1.0
    rewards = rollout.reward[1:]
    metrics = impala(mlp(), MeasuresByHalves).update(rollout).metrics
    assert metrics["positive"] == pytest.approx(rewards[rewards > 0].mean().item())
