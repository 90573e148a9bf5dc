# SPDX-License-Identifier: Apache-2.0
"""IMPALA's update, against a slow loop written from the definition."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import learners
import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.config import IMPALAConfig, OptimiserConfig, StepConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.minibatch import clip_gradients, gradient_norm
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep

T, B, ACTIONS = 5, 3, 3
Make = Callable[..., Rollout]


class TinyNet(ActorCritic):
    """Two linear functions of the observation."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.policy = nn.Linear(size, ACTIONS)
        self.baseline = nn.Linear(size, 1)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        x = inputs.observation
        return ModelOutput(self.policy(x), self.baseline(x).squeeze(-1), core_state)


def impala(model: ActorCritic | None = None, **settings: Any) -> OptimiserStep[Any]:
    return learners.impala(model or TinyNet(), **{"entropy_cost": 0.01, **settings})


def terms_of(step: OptimiserStep[Any], rollout: Rollout) -> dict[str, Tensor]:
    return step.algo.losses(rollout).terms


def weights(step: OptimiserStep[Any]) -> dict[str, Tensor]:
    return copy.deepcopy(step.algo.actor.state_dict())


class Means(IMPALA):
    """A variant whose terms are means over the steps."""

    reduction = "mean"


def slow_losses(model: TinyNet, rollout: Rollout, config: IMPALAConfig) -> dict[str, Tensor]:
    """The three losses from the definition, one environment and one step at a time.

    Step t goes from row t to row t + 1: its action, reward and end are in row t + 1.
    """
    pg = baseline = entropy = torch.zeros(())
    for b in range(B):
        logits = [model.policy(rollout.observation[t, b]) for t in range(T + 1)]
        values = [model.baseline(rollout.observation[t, b])[0] for t in range(T + 1)]
        ratios, rewards, following, ends = [], [], [], []
        for t in range(T):
            action = rollout.action[t + 1, b]
            target = logits[t].softmax(-1)[action]
            behavior = rollout.extras["policy_logits"][t + 1, b].softmax(-1)[action]
            ratios.append((target / behavior).item())
            reward = rollout.reward[t + 1, b].item()
            clipped = config.reward_clipping == "abs_one"
            rewards.append(min(1.0, max(-1.0, reward)) if clipped else reward)
            ends.append(bool(rollout.done[t + 1, b]))
            following.append(value_after(model, rollout, t, b, values))
        for t in range(T):
            vs = vtrace_sum(t, ratios, rewards, following, ends, values, config.discounting)
            next_vs = following[t]
            if not ends[t] and t + 1 < T:
                next_vs = vtrace_sum(
                    t + 1, ratios, rewards, following, ends, values, config.discounting
                )
            target_value = rewards[t] + config.discounting * next_vs
            advantage = min(1.0, ratios[t]) * (target_value - values[t].item())
            log_probs = logits[t].log_softmax(-1)
            pg = pg - log_probs[rollout.action[t + 1, b]] * advantage
            baseline = baseline + config.baseline_cost * 0.5 * (vs - values[t]) ** 2
            entropy = entropy + config.entropy_cost * (log_probs.exp() * log_probs).sum()
    return {"pg_loss": pg, "baseline_loss": baseline, "entropy_loss": entropy}


def value_after(model: TinyNet, rollout: Rollout, t: int, b: int, values: list[Tensor]) -> float:
    """What step t bootstraps from: the next row's value, 0, or the truncated episode's own."""
    if rollout.truncated[t + 1, b]:
        rows, columns = (index.tolist() for index in rollout.truncations())
        which = list(zip(rows, columns, strict=True)).index((t + 1, b))
        return model.baseline(rollout.final_observation[which]).item()
    return 0.0 if rollout.done[t + 1, b] else values[t + 1].item()


def vtrace_sum(
    t: int,
    ratios: list[float],
    rewards: list[float],
    following: list[float],
    ends: list[bool],
    values: list[Tensor],
    discounting: float,
) -> float:
    target, trace = values[t].item(), 1.0
    for s in range(t, T):
        error = rewards[s] + discounting * following[s] - values[s].item()
        target += trace * min(1.0, ratios[s]) * error
        if ends[s]:
            break
        trace *= discounting * min(1.0, ratios[s])
    return target


ENDS: dict[str, dict[str, list[tuple[int, int]]]] = {
    "no end": {},
    "terminated": {"terminated": [(2, 0), (5, 1), (1, 2)]},
    "truncated": {"truncated": [(2, 0), (5, 1), (1, 2), (4, 2)]},
    "both": {"terminated": [(2, 0), (3, 2)], "truncated": [(3, 0), (0, 1), (4, 2)]},
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("reward_clipping", ["abs_one", "none"])
def test_losses_and_gradients_equal_a_slow_loop_from_the_definition(
    make_rollout: Make, ends: Any, reward_clipping: str
) -> None:
    algorithm = impala(reward_clipping=reward_clipping)
    model, config = algorithm.algo.actor, algorithm.algo.config
    assert isinstance(model, TinyNet)
    rollout = make_rollout(T, B, **ends)
    assert rollout.reward.abs().max() > 1
    losses, expected = terms_of(algorithm, rollout), slow_losses(model, rollout, config)
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, rtol=1e-4, atol=1e-5)
        parameters = [p for n, p in model.named_parameters() if (n[0] == "b") == (name[0] == "b")]
        got = torch.autograd.grad(losses[name], parameters, retain_graph=True)
        torch.testing.assert_close(
            got, torch.autograd.grad(loss, parameters, retain_graph=True), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("reward_clipping", ["abs_one", "none"])
def test_scaled_rewards_are_rewards_multiplied_before_they_are_clipped(
    make_rollout: Make, reward_clipping: str
) -> None:
    rollout = make_rollout(T, B, truncated=[(2, 0)])
    plain = impala(reward_clipping=reward_clipping)
    scaling = impala(reward_scale=3.0, reward_clipping=reward_clipping)
    scaling.algo.actor.load_state_dict(plain.algo.actor.state_dict())
    scaled = terms_of(scaling, rollout)
    rollout.reward[1:] *= 3.0
    torch.testing.assert_close(scaled, terms_of(plain, rollout))


def test_the_dummy_agent_output_of_row_0_is_never_used(make_rollout: Make) -> None:
    algorithm, rollout = impala(), make_rollout(T, B)
    before = terms_of(algorithm, rollout)
    for leaf in (rollout.action, *rollout.extras.values(), rollout.reward, rollout.episode_return):
        leaf[0] = 0
    rollout.done[0] = rollout.truncated[0] = rollout.episode_end[0] = True
    torch.testing.assert_close(terms_of(algorithm, rollout), before, rtol=0, atol=0)


def test_rows_of_another_episode_do_not_change_the_loss_of_a_truncated_one(
    make_rollout: Make,
) -> None:
    """With a step whose row after it starts another episode, only the final observation counts."""
    rollout = make_rollout(1, B, truncated=[(1, b) for b in range(B)])
    algorithm = impala()
    before = terms_of(algorithm, rollout)
    rollout.observation[1] = 1e3
    torch.testing.assert_close(terms_of(algorithm, rollout), before, rtol=0, atol=0)
    rollout.final_observation[:] += 1.0
    assert not torch.equal(terms_of(algorithm, rollout)["pg_loss"], before["pg_loss"])


def test_a_truncation_learns_as_if_the_episode_went_on(make_rollout: Make) -> None:
    """The final observation in row T and no end there is the same as a truncation in row T."""
    cut = make_rollout(T, B, truncated=[(T, b) for b in range(B)])
    observation = cut.observation.clone()
    observation[T] = cut.final_observation
    nowhere = torch.zeros_like(cut.done)
    going_on = dataclasses.replace(
        cut, observation=observation, done=nowhere, truncated=nowhere, final_observation=()
    )
    algorithm = impala()
    torch.testing.assert_close(terms_of(algorithm, cut), terms_of(algorithm, going_on))


def test_an_lstms_truncations_use_the_state_from_before_the_reset(make_rollout: Make) -> None:
    """As above, for a model whose values depend on the recurrent state and the last action."""
    model = MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), True)
    state = map_leaves(torch.randn_like, model.initial_state(B))
    cut = make_rollout(T, B, truncated=[(T, b) for b in range(B)], state=state)
    observation = cut.observation.clone()
    observation[T] = cut.final_observation
    nowhere = torch.zeros_like(cut.done)
    going_on = dataclasses.replace(
        cut, observation=observation, done=nowhere, truncated=nowhere, final_observation=()
    )
    algorithm = impala(model)
    torch.testing.assert_close(terms_of(algorithm, cut), terms_of(algorithm, going_on))
    torch.testing.assert_close(
        unroll(model, cut).final_values[-1], unroll(model, going_on).baseline[-1]
    )


def test_the_mean_is_the_sum_divided_by_the_steps(make_rollout: Make) -> None:
    rollout, model = make_rollout(T, B), TinyNet()
    sums = terms_of(impala(model), rollout)
    means = terms_of(impala(model, kind=Means), rollout)
    for name, total in sums.items():
        torch.testing.assert_close(means[name] * rollout.num_steps, total)


@pytest.mark.parametrize("entropy_cost", [0.01, 0.0])
@pytest.mark.parametrize("kind", [IMPALA, Means])
def test_an_update_reports_the_mean_entropy_in_nats(
    make_rollout: Make, kind: type[IMPALA], entropy_cost: float
) -> None:
    algorithm = impala(kind=kind, entropy_cost=entropy_cost)
    rollout = make_rollout(T, B)
    with torch.no_grad():
        logits = algorithm.algo.actor.policy(rollout.observation[:-1])
    expected = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert algorithm.update(rollout).metrics["entropy"] == pytest.approx(expected, rel=1e-5)


def test_an_update_reports_its_losses_and_changes_the_weights(make_rollout: Make) -> None:
    algorithm, rollout = impala(), make_rollout(T, B)
    losses = terms_of(algorithm, rollout)
    before = weights(algorithm)
    stats = algorithm.update(rollout).metrics
    for name, loss in losses.items():
        assert stats[name] == pytest.approx(loss.item())
    assert stats["total_loss"] == pytest.approx(sum(loss.item() for loss in losses.values()))
    assert stats["learning_rate"] == pytest.approx(0.00048)
    assert stats["grad_norm"] > 0
    assert all(isinstance(value, float) for value in stats.values())
    for name, tensor in algorithm.algo.actor.state_dict().items():
        assert not torch.equal(tensor, before[name]), name


def test_an_update_is_one_rmsprop_step_with_clipped_gradients(make_rollout: Make) -> None:
    algorithm, rollout = impala(grad_norm_clipping=0.1), make_rollout(T, B)
    model = copy.deepcopy(algorithm.algo.actor)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.00048, alpha=0.99, eps=0.01)
    torch.stack(list(terms_of(impala(model), rollout).values())).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    optimizer.step()
    assert algorithm.update(rollout).metrics["grad_norm"] == pytest.approx(norm.item())
    torch.testing.assert_close(algorithm.algo.actor.state_dict(), model.state_dict())


@pytest.mark.parametrize("maximum", [0.5, 1e9, math.inf])
def test_clipping_equals_torchs(maximum: float) -> None:
    ours, theirs = TinyNet(), TinyNet()
    for model in (ours, theirs):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, index - 1.5)
    norm = gradient_norm(ours.parameters()).item()
    clip_gradients(ours.parameters(), norm, maximum)
    assert nn.utils.clip_grad_norm_(theirs.parameters(), maximum).item() == pytest.approx(norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("reward", math.nan, "pg_loss is nan"),
        ("extras", math.nan, "pg_loss is nan"),
        ("observation", math.inf, "pg_loss is nan"),
    ],
)
def test_a_loss_that_is_not_finite_is_named_before_any_weight_is_touched(
    make_rollout: Make, field: str, value: float, name: str
) -> None:
    algorithm = impala()
    algorithm.update(make_rollout(T, B))
    state = copy.deepcopy(algorithm.state_dict())
    broken = make_rollout(T, B)
    (leaf,) = flatten(getattr(broken, field))
    leaf[2, 1] = value
    with pytest.raises(NonFiniteError, match=name):
        algorithm.update(broken)
    torch.testing.assert_close(algorithm.state_dict(), state, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_named_before_any_weight_is_touched(
    make_rollout: Make,
) -> None:
    algorithm, rollout = impala(), make_rollout(T, B)
    before = weights(algorithm)
    handle = algorithm.algo.actor.baseline.weight.register_hook(
        lambda gradient: gradient * math.inf
    )
    with pytest.raises(NonFiniteError, match=r"gradient of actor\.baseline\.weight is not finite"):
        algorithm.update(rollout)
    torch.testing.assert_close(weights(algorithm), before, rtol=0, atol=0)
    handle.remove()
    assert math.isfinite(algorithm.update(rollout).metrics["grad_norm"])


def test_the_learning_rate_goes_linearly_to_0_over_total_steps(make_rollout: Make) -> None:
    updates = 4
    algorithm = impala(total_steps=updates * T * B, learning_rate=0.1)
    rates = [
        algorithm.update(make_rollout(T, B)).metrics["learning_rate"] for _ in range(updates + 2)
    ]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0])


def test_the_learning_rate_grows_from_0_over_warmup_steps(make_rollout: Make) -> None:
    updates, size = 8, T * B
    algorithm = impala(total_steps=updates * size, warmup_steps=4 * size, learning_rate=0.8)
    rates = [algorithm.update(make_rollout(T, B)).metrics["learning_rate"] for _ in range(updates)]
    falling = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    grown = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert rates == pytest.approx([a * b for a, b in zip(falling, grown, strict=True)])


def test_nothing_is_learnt_past_total_steps(make_rollout: Make) -> None:
    algorithm = impala(total_steps=T * B)
    algorithm.update(make_rollout(T, B))
    before = weights(algorithm)
    algorithm.update(make_rollout(T, B))
    torch.testing.assert_close(weights(algorithm), before, rtol=0, atol=0)


def test_steps_count_by_batch_whatever_its_size(make_rollout: Make) -> None:
    algorithm = impala(total_steps=100, learning_rate=1.0)
    algorithm.update(make_rollout(10, 2))
    algorithm.update(make_rollout(10, 3))
    assert algorithm.algo.optimisers["actor"].param_groups[0]["lr"] == pytest.approx(0.5)


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_restored_checkpoint_makes_the_identical_next_step(make_rollout: Make) -> None:
    settings = {"momentum": 0.9, "total_steps": 3 * T * B}
    first, other = impala(**settings), impala(**settings)
    first.update(make_rollout(T, B))
    other.load_state_dict(saved_and_loaded(first.state_dict()))
    rollout = make_rollout(T, B, truncated=[(2, 1)])
    assert first.update(rollout).metrics == other.update(rollout).metrics
    torch.testing.assert_close(first.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert other.version == 2


def test_a_longer_run_continues_a_checkpoint_on_its_own_schedule(make_rollout: Make) -> None:
    short, long = (impala(total_steps=n * T * B, learning_rate=1.0) for n in (1, 4))
    short.update(make_rollout(T, B))
    long.load_state_dict(saved_and_loaded(short.state_dict()))
    assert long.update(make_rollout(T, B)).metrics["learning_rate"] == pytest.approx(0.75)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing() -> None:
    small, large = impala(TinyNet(4)), impala(TinyNet(5))
    before = weights(large)
    message = r"policy\.weight is \[3, 4\] in the checkpoint and \[3, 5\] in the model"
    with pytest.raises(ValueError, match=message):
        large.load_state_dict(small.state_dict())
    torch.testing.assert_close(weights(large), before, rtol=0, atol=0)


def test_a_checkpoint_without_our_counts_is_refused_and_changes_nothing(make_rollout: Make) -> None:
    algorithm, other = impala(), impala()
    before = weights(algorithm)
    other.update(make_rollout(T, B))
    state = {**other.state_dict(), "scheduler_state_dict": {"last_epoch": 3}}
    with pytest.raises(ValueError, match=r"lacks .*steps, version.*not resumed"):
        algorithm.load_state_dict(state)
    torch.testing.assert_close(weights(algorithm), before, rtol=0, atol=0)


@pytest.mark.parametrize(("before", "now"), [("rmsprop", "adam"), ("adam", "rmsprop")])
def test_a_checkpoint_of_another_optimiser_is_refused_and_changes_nothing(
    make_rollout: Make, before: str, now: str
) -> None:
    saved, other = impala(optimiser=before), impala(optimiser=now)
    saved.update(make_rollout(T, B))
    unchanged = copy.deepcopy(other.state_dict())
    names = {"adam": "Adam", "rmsprop": "RMSprop"}
    message = f"is different: it has .* of {names[before]}, but .* has .* of {names[now]};"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    torch.testing.assert_close(other.state_dict(), unchanged, rtol=0, atol=0)


def test_a_run_with_adam_continues_with_adamw(make_rollout: Make) -> None:
    adam, adamw = impala(optimiser="adam"), impala(optimiser="adamw", weight_decay=0.1)
    adam.update(make_rollout(T, B))
    adamw.load_state_dict(saved_and_loaded(adam.state_dict()))
    assert adamw.state_dict()["optimizer_state_dict"]["state"][0]["step"] == 1
    adamw.update(make_rollout(T, B))


def test_a_checkpoint_with_other_layers_is_refused_by_the_first_missing_one() -> None:
    spaces = (ArraySpec((4,), "float32"), Discrete(ACTIONS))
    plain, recurrent = (impala(MLPNet(*spaces, use_lstm)) for use_lstm in (False, True))
    with pytest.raises(ValueError, match=r"core\.weight_ih_l0 is missing in the checkpoint"):
        recurrent.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("use_lstm", [False, True])
def test_done_may_be_bytes_or_booleans(make_rollout: Make, use_lstm: bool) -> None:
    model = MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), use_lstm)
    algorithm = impala(model)
    rollout = make_rollout(T, B, **ENDS["both"], state=model.initial_state(B))
    as_bytes = dataclasses.replace(
        rollout,
        done=rollout.done.byte(),
        truncated=rollout.truncated.byte(),
        episode_end=rollout.episode_end.byte(),
    )
    torch.testing.assert_close(terms_of(algorithm, as_bytes), terms_of(algorithm, rollout))
    assert as_bytes.finished_episodes() == rollout.finished_episodes()


def test_the_better_arm_of_a_bandit_is_learnt(make_rollout: Make) -> None:
    """On-policy, one step per episode: arm 2 pays 1, the others nothing."""
    algorithm = impala(total_steps=10**9, learning_rate=0.01)
    distribution = distribution_for(Discrete(ACTIONS))
    observation = torch.ones(11, 8, 4)
    for _ in range(60):
        logits = algorithm.algo.actor.policy(observation).detach()
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
        algorithm.update(rollout)
    chances = algorithm.algo.actor.policy(observation[0, 0]).softmax(-1)
    assert chances[2] > 0.9


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (IMPALAConfig, {"discounting": 1.5}, "discounting must be between 0 and 1, got 1.5"),
        (IMPALAConfig, {"entropy_cost": -1.0}, "entropy_cost must be at least 0, got -1.0"),
        (IMPALAConfig, {"reward_scale": 0.0}, "reward_scale must be greater than 0, got 0.0"),
        (
            IMPALAConfig,
            {"reward_clipping": "soft"},
            "reward_clipping must be one of auto, abs_one, none, got 'soft'",
        ),
        (
            OptimiserConfig,
            {"learning_rate": math.nan},
            "learning_rate must be greater than 0, got nan",
        ),
        (OptimiserConfig, {"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        (StepConfig, {"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        (
            StepConfig,
            {"grad_norm_clipping": -1.0},
            "grad_norm_clipping must be greater than 0, got -1.0",
        ),
    ],
)
def test_an_impossible_setting_is_refused(config: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_a_clipping_that_nobody_has_resolved_is_refused_before_anything_is_learnt(
    make_rollout: Make,
) -> None:
    algorithm = impala(reward_clipping="auto")
    before = weights(algorithm)
    with pytest.raises(
        ValueError, match="reward_clipping must be one of abs_one, none, got 'auto'"
    ):
        algorithm.update(make_rollout(T, B))
    torch.testing.assert_close(weights(algorithm), before, rtol=0, atol=0)
