# SPDX-License-Identifier: Apache-2.0
"""PPO's update, against a slow loop written from the definition."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import learners
import numpy as np
import pytest
import torch
from assorted import check_rollout
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.config import PPOConfig
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError

T, B, ACTIONS, GAMMA, CLIP = 6, 4, 3, 0.9, 0.2
Make = Callable[..., Rollout]
ENDS: dict[str, dict[str, Any]] = {
    "none": {},
    "terminated": {"terminated": [(2, 0), (6, 1)]},
    "truncated": {"truncated": [(3, 0), (6, 2), (1, 2)]},
    "both": {"terminated": [(4, 1), (5, 3)], "truncated": [(2, 3), (6, 0), (2, 0)]},
}
INVALID = [(3, 0), (5, 3), (6, 1), (1, 2)]  # rows that the steps lead to, and columns


class TinyNet(ActorCritic):
    """Two linear functions of the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(4, ACTIONS)
        self.baseline = nn.Linear(4, 1)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        x = inputs.observation
        return ModelOutput(self.policy(x), self.baseline(x).squeeze(-1), core_state)


def ppo(actor: ActorCritic | None = None, **settings: Any) -> OptimiserStep[Any]:
    settings = {"discounting": GAMMA, "clip_param": CLIP, **settings}
    return learners.ppo(actor or TinyNet(), **settings)


def mlp(use_lstm: bool = False) -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), use_lstm)


def masked(rollout: Rollout, *invalid: tuple[int, int]) -> Rollout:
    valid = torch.ones_like(rollout.done)
    for row, column in invalid:
        valid[row, column] = False
    return dataclasses.replace(rollout, valid=valid)


def acted_by(actor: ActorCritic, rollout: Rollout) -> Rollout:
    """The rollout as if this actor had chosen its actions."""
    with torch.no_grad():
        logits = unroll(actor, rollout).policy_logits
    logits = torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])
    return dataclasses.replace(rollout, extras={"policy_logits": logits})


def whole(algo: Any, rollout: Rollout) -> Rollout:
    """The one minibatch that is the batch, prepared by the present weights."""
    (minibatch,) = algo.minibatches(prepared(algo, rollout))
    return minibatch


@torch.no_grad()
def prepared(algo: Any, rollout: Rollout) -> Rollout:
    found: Rollout = algo.prepare(rollout)
    return found


def slow_advantages(net: TinyNet, rollout: Rollout, lambda_: float) -> np.ndarray:
    """[T, B] by the sum over errors; an end or an invalid step ends it.

    Step t goes from row t to row t + 1: its action, reward and end are in row t + 1.
    """
    values = net.baseline(rollout.observation).squeeze(-1).detach()
    rows, columns = rollout.truncations()
    places = list(zip(rows.tolist(), columns.tolist(), strict=True))
    advantages = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            weight = 1.0
            for s in range(t, T):
                if not is_valid(rollout, s, b):
                    break
                following = values[s + 1, b].item()
                if rollout.truncated[s + 1, b]:
                    final = rollout.final_observation[places.index((s + 1, b))]
                    following = net.baseline(final).item()
                elif rollout.done[s + 1, b]:
                    following = 0.0
                reward = min(1.0, max(-1.0, rollout.reward[s + 1, b].item()))
                error = reward + GAMMA * following - values[s, b].item()
                advantages[t, b] += weight * error
                if rollout.done[s + 1, b]:
                    break
                weight *= GAMMA * lambda_
    return advantages


def is_valid(rollout: Rollout, step: int, column: int) -> bool:
    return rollout.valid is None or bool(rollout.valid[step + 1, column])


def slow_terms(old: TinyNet, new: TinyNet, rollout: Rollout, config: Any) -> dict[str, Tensor]:
    """The three losses of `new`, whose targets come from `old`, one step at a time.

    They have the gradient of `new`. Asserts that ratios and values lie on both sides of each clip.
    """
    places = [(t, b) for t in range(T) for b in range(B) if is_valid(rollout, t, b)]
    raw = slow_advantages(old, rollout, config.gae_lambda)
    seen = np.array([raw[place] for place in places])
    pg, value_losses, entropies = [], [], []
    sides, moves = set(), set()
    for t, b in places:
        advantage = raw[t, b]
        if config.normalise_advantages:
            advantage = (advantage - seen.mean()) / seen.std()
        action = rollout.action[t + 1, b]
        chances = new.policy(rollout.observation[t, b]).softmax(-1)
        ratio = chances[action] / rollout.extras["policy_logits"][t + 1, b].softmax(-1)[action]
        if advantage > 0:
            gain = min(ratio, torch.tensor(1 + CLIP)) * advantage
        else:
            gain = max(ratio, torch.tensor(1 - CLIP)) * advantage
        sides.add((advantage > 0, (ratio > 1 + CLIP).item(), (ratio < 1 - CLIP).item()))
        pg.append(-gain)
        before = old.baseline(rollout.observation[t, b])[0].item()
        value, target = new.baseline(rollout.observation[t, b])[0], before + raw[t, b]
        moves.add(((value > before + CLIP).item(), (value < before - CLIP).item()))
        error = (value - target) ** 2
        if config.use_clipped_value_loss:
            if value > before + CLIP:
                error = max(error, torch.tensor((before + CLIP - target) ** 2))
            elif value < before - CLIP:
                error = max(error, torch.tensor((before - CLIP - target) ** 2))
        value_losses.append(0.5 * error)
        entropies.append(-(chances * chances.log()).sum())
    assert len(sides) == 6, "advantages of both signs within and on both sides of the clip"
    assert len(moves) == 3, "values within and on both sides of the clip"
    return {
        "pg_loss": torch.stack(pg).mean(),
        "baseline_loss": config.baseline_cost * torch.stack(value_losses).mean(),
        "entropy_loss": -config.entropy_cost * torch.stack(entropies).mean(),
    }


def test_by_default_a_value_follows_returns_of_any_size(make_rollout: Make) -> None:
    """CartPole's returns are near 100: a value that moves by 0.2 a batch does not get there."""
    algo: Any = ppo(num_mini_batch=1, num_epochs=1).algo
    minibatch = whole(algo, acted_by(algo.actor, make_rollout(T, B)))
    minibatch.extras["value_targets"] += 100
    bias = algo.actor.baseline.bias
    bias.data += 10 * CLIP  # in this batch already
    algo.losses(minibatch).terms["baseline_loss"].backward()
    assert bias.grad.item() < -10, "further up"


@pytest.mark.parametrize("invalid", [[], INVALID], ids=["all", "some"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_clipped_value_loss": True}, {"normalise_advantages": False}, {"gae_lambda": 0.3}],
    ids=["usual", "clipped_values", "raw_advantages", "short"],
)
def test_losses_and_gradients_equal_a_slow_loop(
    make_rollout: Make, ends: str, invalid: Any, settings: dict[str, Any]
) -> None:
    old, new = TinyNet(), TinyNet()
    rollout = make_rollout(T, B, **ENDS[ends])
    rollout = masked(rollout, *invalid) if invalid else rollout
    acted = acted_by(new, rollout).extras["policy_logits"]
    rollout = dataclasses.replace(
        rollout, extras={"policy_logits": acted + 0.5 * torch.randn_like(acted)}
    )
    algo: Any = ppo(copy.deepcopy(old), num_mini_batch=1, num_epochs=1, **settings).algo
    minibatch = whole(algo, rollout)
    algo.actor.load_state_dict(new.state_dict())  # as after some optimiser steps
    terms, expected = algo.losses(minibatch).terms, slow_terms(old, new, rollout, algo.config)
    assert terms.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(terms[name], loss.float(), rtol=1e-4, atol=1e-5)
        got = torch.autograd.grad(
            terms[name], list(algo.actor.parameters()), retain_graph=True, allow_unused=True
        )
        wanted = torch.autograd.grad(
            loss, list(new.parameters()), retain_graph=True, allow_unused=True
        )
        for mine, theirs in zip(got, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_truncation_learns_as_if_the_episode_went_on(make_rollout: Make) -> None:
    """The final observation in row T and no end there is the same as a truncation in row T."""
    cut = make_rollout(T, B, truncated=[(T, b) for b in range(B)])
    observation = cut.observation.clone()
    observation[T] = cut.final_observation
    nowhere = torch.zeros_like(cut.done)
    going_on = dataclasses.replace(
        cut, observation=observation, done=nowhere, truncated=nowhere, final_observation=()
    )
    algo = ppo().algo
    torch.testing.assert_close(prepared(algo, cut).extras, prepared(algo, going_on).extras)


def test_metrics_are_those_of_their_definitions(make_rollout: Make) -> None:
    net, rollout = TinyNet(), masked(make_rollout(T, B, **ENDS["both"]), *INVALID)
    algo: Any = ppo(net, num_mini_batch=1, num_epochs=1).algo
    metrics = {
        name: (figure.total / figure.steps).item()
        for name, figure in algo.losses(whole(algo, rollout)).metrics.items()
    }
    valid = rollout.valid[1:].numpy()
    log_probs = net.policy(rollout.observation[:-1]).log_softmax(-1).detach().numpy()
    acted = rollout.extras["policy_logits"][1:].log_softmax(-1).numpy()
    chosen = rollout.action[1:, :, None].numpy()
    logs = np.take_along_axis(log_probs - acted, chosen, -1)[..., 0][valid]
    ratios = np.exp(logs)
    expected = {
        "entropy": -(np.exp(log_probs) * log_probs).sum(-1)[valid].mean(),
        "approx_kl": (ratios - 1 - logs).mean(),
        "clip_fraction": ((ratios < 1 - CLIP) | (ratios > 1 + CLIP)).mean(),
        "ratio": ratios.mean(),
        "ratio_distance": abs(ratios - 1).mean(),
    }
    assert 0 < expected["clip_fraction"] < 1
    assert metrics == pytest.approx(expected, rel=1e-4)
    errors = slow_advantages(net, rollout, algo.config.gae_lambda)[valid]
    targets = errors + net.baseline(rollout.observation[:-1]).squeeze(-1).detach().numpy()[valid]
    explained = algo.metrics(prepared(algo, rollout))["explained_variance"].item()
    assert explained == pytest.approx(1 - errors.var() / targets.var(), rel=1e-3)


def test_nothing_is_explained_of_targets_that_are_all_equal(make_rollout: Make) -> None:
    net = TinyNet()
    with torch.no_grad():
        net.baseline.weight.zero_()
        net.baseline.bias.zero_()
    rollout = make_rollout(T, B)
    rollout = dataclasses.replace(rollout, reward=torch.zeros_like(rollout.reward))
    assert "explained_variance" not in ppo(net).update(rollout).metrics


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_an_invalid_step_holds_changes_nothing(make_rollout: Make, bad: float) -> None:
    rollout = masked(make_rollout(T, B, **ENDS["both"]), *INVALID)
    clean, dirty = ppo(TinyNet(), num_epochs=2), ppo(TinyNet(), num_epochs=2)
    dirty.algo.actor.load_state_dict(clean.algo.actor.state_dict())
    broken = copy.deepcopy(rollout)
    for row, column in INVALID:
        broken.reward[row, column] = bad
        broken.extras["policy_logits"][row, column] = bad
    metrics = []
    for step, batch in ((clean, rollout), (dirty, broken)):
        torch.manual_seed(3)
        metrics.append(step.update(batch).metrics)
    assert metrics[0] == metrics[1] and all(map(math.isfinite, metrics[0].values()))
    torch.testing.assert_close(dirty.state_dict(), clean.state_dict(), rtol=0, atol=0)


def test_the_advantages_of_every_minibatch_have_mean_0_and_deviation_1_over_valid_steps(
    make_rollout: Make,
) -> None:
    rollout = masked(make_rollout(T, B), *INVALID)
    algo: Any = ppo(num_mini_batch=2).algo
    seen = 0
    for minibatch in algo.minibatches(prepared(algo, rollout)):
        advantages = minibatch.extras["advantages"][1:][minibatch.mask]
        assert advantages.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantages.std(correction=0).item() == pytest.approx(1, rel=1e-4)
        seen += len(advantages)
    assert seen == algo.config.num_epochs * (T * B - len(INVALID))


def test_the_policy_that_acted_is_the_same_in_all_epochs(make_rollout: Make) -> None:
    """The first step finds ratios of 1; each later one finds them further away."""
    net = TinyNet()
    rollout = acted_by(net, make_rollout(T, B))
    step: Any = ppo(net, num_mini_batch=1, num_epochs=4, learning_rate=0.01)
    kls: list[float] = []
    step.algo.stops_after = lambda metrics: kls.append(metrics["approx_kl"])
    step.update(rollout)
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < kls[1] < kls[2] < kls[3]


def test_advantages_and_old_values_are_those_from_before_the_first_step(make_rollout: Make) -> None:
    rollout, step = make_rollout(T, B), ppo(num_mini_batch=2, learning_rate=0.1)
    algo: Any = step.algo
    before = prepared(algo, rollout).extras
    found: list[Rollout] = []
    algo.losses = keeping(algo.losses, found)
    step.update(rollout)
    assert len(found) == 2 * algo.config.num_epochs
    for minibatch in found:
        for name in ("old_values", "value_targets"):
            values = minibatch.extras[name][1:].flatten().tolist()
            assert set(values) <= set(before[name][1:].flatten().tolist())


def keeping(losses: Callable[[Rollout], Any], found: list[Rollout]) -> Callable[[Rollout], Any]:
    def keep(minibatch: Rollout) -> Any:
        found.append(minibatch)
        return losses(minibatch)

    return keep


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_an_epoch_has_every_step_once_and_in_another_order_than_the_others(
    make_rollout: Make, parts: int
) -> None:
    rollout = make_rollout(T, B, episode_step=torch.arange((T + 1) * B).reshape(T + 1, B))
    algo: Any = ppo(num_mini_batch=parts, num_epochs=3).algo
    minibatches = list(algo.minibatches(prepared(algo, rollout)))
    assert len(minibatches) == 3 * parts
    sizes = {minibatch.num_steps for minibatch in minibatches}
    assert max(sizes) - min(sizes) <= 1 and all(m.env_steps == 0 for m in minibatches)
    epochs = [minibatches[i * parts : (i + 1) * parts] for i in range(3)]
    orders = [torch.cat([m.episode_step[1] for m in epoch]).tolist() for epoch in epochs]
    assert all(sorted(order) == list(range(B, (T + 1) * B)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_a_recurrent_network_learns_whole_columns_from_their_initial_state(
    make_rollout: Make,
) -> None:
    """A minibatch's policies and values are those of these columns in the whole batch."""
    net = mlp(use_lstm=True)
    state = map_leaves(torch.randn_like, net.initial_state(B))
    rollout = acted_by(net, make_rollout(T, B, **ENDS["both"], state=state))
    algo: Any = ppo(net, num_mini_batch=2, num_epochs=2).algo
    minibatches = list(algo.minibatches(prepared(algo, rollout)))
    columns = [minibatch.env_index[0].tolist() for minibatch in minibatches]
    assert [len(found) for found in columns] == [2, 2, 2, 2]
    for first, second in (columns[:2], columns[2:]):
        assert sorted(first + second) == list(range(B))
    for minibatch in minibatches:
        metrics = algo.losses(minibatch).metrics
        assert metrics["ratio_distance"].total.item() == pytest.approx(0, abs=1e-4)
        check_rollout(minibatch)


@pytest.mark.parametrize(
    ("use_lstm", "length", "parts", "settings", "refused"),
    [
        (False, 2, B, {}, False),
        (False, 2, B + 1, {}, True),  # eight steps in five parts: one part has a single step
        (False, 2, B + 1, {"normalise_advantages": False}, False),
        (True, 2, B, {}, False),  # minibatches are whole rollouts
        (True, 1, B, {}, True),
    ],
)
def test_minibatches_of_a_single_step_are_refused(
    make_rollout: Make,
    use_lstm: bool,
    length: int,
    parts: int,
    settings: dict[str, Any],
    refused: bool,
) -> None:
    net = mlp(use_lstm)
    step = ppo(net, num_mini_batch=parts, num_epochs=2, **settings)
    refusal = pytest.raises(UsageError, match="num_mini_batch . leaves one step")
    with refusal if refused else contextlib.nullcontext():
        step.update(make_rollout(length, B, state=net.initial_state(B)))


@pytest.mark.parametrize(
    ("use_lstm", "message"),
    [(True, "5 is more than the 4 rollouts"), (False, "5 is more than the 4 steps")],
)
def test_more_minibatches_than_there_is_to_share_are_refused(
    make_rollout: Make, use_lstm: bool, message: str
) -> None:
    net = mlp(use_lstm)
    step = ppo(net, num_mini_batch=5)
    with pytest.raises(UsageError, match=f"num_mini_batch {message} of a batch: use at most 4"):
        step.update(make_rollout(3 if use_lstm else 1, B, state=net.initial_state(B)))


def test_an_update_counts_every_epoch_as_learnt_and_its_steps_once(make_rollout: Make) -> None:
    step = ppo(mlp(), num_epochs=3, num_mini_batch=2, total_steps=4 * T * B, learning_rate=0.1)
    rates = [step.update(make_rollout(T, B)).metrics["learning_rate"] for _ in range(2)]
    counters = step.counters
    assert (counters.env_steps, counters.learnt_steps) == (2 * T * B, 2 * 3 * T * B)
    assert (counters.optimiser_steps, counters.version) == (2 * 3 * 2, 2)
    assert rates == pytest.approx([0.1, 0.075])


def test_a_target_kl_ends_the_update_after_the_minibatch_that_is_beyond_it(
    make_rollout: Make,
) -> None:
    """With the first minibatch a policy that acted itself is at 0, with the second it is not."""
    net = TinyNet()
    rollout = acted_by(net, make_rollout(T, B))
    settings = {"num_mini_batch": 1, "num_epochs": 5, "learning_rate": 0.1}
    limited = ppo(copy.deepcopy(net), target_kl=1e-4, **settings)
    free = ppo(copy.deepcopy(net), **settings)
    assert limited.update(rollout).metrics["approx_kl"] > 0
    free.update(rollout)
    assert (limited.counters.optimiser_steps, free.counters.optimiser_steps) == (2, 5)
    assert limited.counters.env_steps == T * B


@pytest.mark.parametrize("use_lstm", [False, True])
def test_slices_of_minibatches_in_threads_learn_the_same(
    make_rollout: Make, use_lstm: bool
) -> None:
    net = mlp(use_lstm)
    rollout = masked(make_rollout(T, B, **ENDS["both"], state=net.initial_state(B)), *INVALID)
    whole_batch = ppo(copy.deepcopy(net), num_mini_batch=2)
    sliced = ppo(copy.deepcopy(net), num_mini_batch=2, bytes_at_once=1, num_threads=2)
    metrics = []
    for step in (whole_batch, sliced):
        torch.manual_seed(5)
        metrics.append(step.update(rollout).metrics)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-5)
    weights = (step.algo.actor.state_dict() for step in (whole_batch, sliced))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_the_better_arm_of_a_bandit_is_learnt(make_rollout: Make) -> None:
    """On-policy, one step per episode: arm 2 pays 1, the others nothing."""
    step = ppo(total_steps=10**9, learning_rate=0.01)
    distribution = distribution_for(Discrete(ACTIONS))
    observation = torch.ones(11, 8, 4)
    for _ in range(20):
        logits = step.algo.actor.policy(observation).detach()
        action = distribution.sample(logits)
        rollout = make_rollout(
            10,
            8,
            observation=observation,
            extras={"policy_logits": logits},
            action=action,
            reward=(action == 2).float(),
            done=torch.ones(11, 8, dtype=torch.bool),
        )
        step.update(rollout)
    chances = step.algo.actor.policy(observation[0, 0]).softmax(-1)
    assert chances[2] > 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        ({"num_mini_batch": 0}, "num_mini_batch must be at least 1, got 0"),
        ({"clip_param": 0.0}, "clip_param must be greater than 0, got 0.0"),
        ({"target_kl": 0.0}, "target_kl must be greater than 0, got 0.0"),
        ({"gae_lambda": 1.1}, "gae_lambda must be between 0 and 1, got 1.1"),
        ({"discounting": 1.1}, "discounting must be between 0 and 1, got 1.1"),
    ],
)
def test_an_impossible_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_it_learns_nothing_from_replay() -> None:
    assert not PPO.learns_from_replay
