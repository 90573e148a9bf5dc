# SPDX-License-Identifier: Apache-2.0
"""LASER's update: IMPALA's, except that irrelevant replayed states are not learnt from."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import learners
import pytest
import torch
from assorted import check_rollout
from implied_policy import by_definition, probabilities
from torch import Tensor, nn

from torchbeast.core.actors.contract import ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.config import LASERConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.laser import LASER
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete, MultiBinary, MultiDiscrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import UsageError

T, B, ACTIONS = 6, 5, 3
REPLAYED = (2, 3, 4)
COLUMN = (T + 1) * 4 * 4  # bytes: observations of four floats
Make = Callable[..., Rollout]
Kind = type[IMPALA]
ENDS: dict[str, dict[str, list[tuple[int, int]]]] = {
    "no end": {},
    "terminated": {"terminated": [(2, 0), (T, 1), (1, 2), (3, 3), (T, 4)]},
    "truncated": {"truncated": [(2, 0), (T, 1), (1, 2), (3, 3), (4, 3), (T, 4)]},
    "both": {"terminated": [(2, 2), (4, 3)], "truncated": [(3, 2), (0, 3), (5, 4)]},
}


class Table(ActorCritic):
    """A policy and a value for each state, which the observation numbers."""

    separable = True

    def __init__(self, num_states: int = 100) -> None:
        super().__init__()
        self.policy = nn.Parameter(torch.randn(num_states, ACTIONS))
        self.baseline = nn.Parameter(torch.randn(num_states))

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        state: Any = inputs.observation
        return ModelOutput(self.policy[state], self.baseline[state], core_state)


def laser(model: Any = None, kind: Kind = LASER, **settings: Any) -> OptimiserStep[Any]:
    settings = {"entropy_cost": 0.01, "reward_clipping": "none", **settings}
    return learners.impala(Table() if model is None else model, kind, **settings)


def mlp(use_lstm: bool = False) -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(ACTIONS), use_lstm)


def columns(*marked: int) -> Tensor:
    """[T+1, B], true in these columns."""
    return torch.tensor([column in marked for column in range(B)]).expand(T + 1, B)


@pytest.fixture
def make_mixed(make_rollout: Make) -> Make:
    """Rollouts of which some columns are replayed; every row and final observation is a state of
    its own: row t of column b has the number t * B + b.
    """

    def make(**settings: Any) -> Rollout:
        truncated = [place for place in settings.get("truncated", ()) if place[0]]
        states = torch.arange((T + 1) * B + len(truncated)).split([(T + 1) * B, len(truncated)])
        own = {
            "observation": states[0].view(T + 1, B),
            "final_observation": states[1],
            "replayed": columns(*REPLAYED),
            "collected": T * (B - len(REPLAYED)),
        }
        rollout = make_rollout(T, B, **{**own, **settings})
        check_rollout(rollout)
        return rollout

    return make


def betas(model: Table, rollout: Rollout) -> Tensor:
    """[T, B] by the definition: the policy in state t, and the behaviour that left it."""
    found = torch.zeros(T, B)
    for t in range(T):
        for b in range(B):
            pi = probabilities(model.policy[t * B + b])
            mu = probabilities(rollout.extras["policy_logits"][t + 1, b])
            found[t, b] = by_definition(pi, mu)
    return found


def middle_of(replayed: Tensor) -> float:
    """A threshold that half of them are below."""
    ordered = replayed.flatten().sort().values
    return float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())


def slow_losses(
    model: Table, rollout: Rollout, config: LASERConfig, relevant: Tensor
) -> dict[str, Tensor]:
    """The three losses from the definition, one environment and one step at a time."""
    pg = baseline = entropy = torch.zeros(())
    gamma = config.discounting
    for b in range(B):
        values = [model.baseline[t * B + b] for t in range(T + 1)]
        log_probs = [model.policy[t * B + b].log_softmax(-1) for t in range(T)]
        actions = rollout.action[1:, b].tolist()
        behaviors = [probabilities(logits) for logits in rollout.extras["policy_logits"][1:, b]]
        weights = [
            min(1.0, math.exp(log_probs[t][a].item()) / behaviors[t][a])
            for t, a in enumerate(actions)
        ]
        rewards, ends = rollout.reward[1:, b].tolist(), rollout.done[1:, b].tolist()
        following = [value_after(model, rollout, t, b) for t in range(T)]

        def target(
            t: int,
            b: int = b,
            values: Any = values,
            weights: Any = weights,
            rewards: Any = rewards,
            ends: Any = ends,
            following: Any = following,
        ) -> float:
            total, trace = values[t].item(), 1.0
            for s in range(t, T):
                if not relevant[s, b]:
                    break  # the sum before it has bootstrapped from its value
                error = rewards[s] + gamma * following[s] - values[s].item()
                total += trace * weights[s] * error
                if ends[s]:
                    break
                trace *= gamma * weights[s]
            return total

        for t in range(T):
            if not rollout.replayed[0, b] and (rollout.valid is None or rollout.valid[t + 1, b]):
                entropy = entropy + (log_probs[t].exp() * log_probs[t]).sum()
            if not relevant[t, b]:
                continue
            bootstraps = ends[t] or t + 1 == T
            next_target = following[t] if bootstraps else target(t + 1)
            advantage = weights[t] * (rewards[t] + gamma * next_target - values[t].item())
            pg = pg - log_probs[t][actions[t]] * advantage
            baseline = baseline + 0.5 * (target(t) - values[t]) ** 2
    return {
        "pg_loss": pg,
        "baseline_loss": config.baseline_cost * baseline,
        "entropy_loss": config.entropy_cost * entropy,
    }


def value_after(model: Table, rollout: Rollout, t: int, b: int) -> float:
    """The value that follows step t: the next row's, 0, or that of the truncated episode."""
    if rollout.truncated[t + 1, b]:
        found = [index.tolist() for index in rollout.truncations()]
        which = list(zip(*found, strict=True)).index((t + 1, b))
        return model.baseline[rollout.final_observation[which]].item()
    return 0.0 if rollout.done[t + 1, b] else model.baseline[(t + 1) * B + b].item()


def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))


@pytest.mark.parametrize("invalid", [[], [(2, 0), (4, 1), (3, 2), (5, 3)]], ids=["all", "some"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_losses_and_gradients_equal_a_slow_loop_from_the_definition(
    make_mixed: Make, ends: Any, invalid: list[tuple[int, int]]
) -> None:
    """invalid: rows that steps lead to which are not learnt from, and their columns."""
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    for place in invalid:
        valid[place] = False
    model, rollout = Table(), make_mixed(**ends, valid=valid if invalid else None)
    found = betas(model, rollout)
    threshold = middle_of(found[:, REPLAYED])
    relevant = ((found < threshold) | ~rollout.replayed[1:]) & valid[1:]
    assert 0 < (~relevant).sum() < T * len(REPLAYED)
    step = laser(model, replay_kl_threshold=threshold)
    losses = step.algo.losses(rollout)
    expected = slow_losses(model, rollout, step.algo.config, relevant)
    assert set(losses.terms) == set(expected)
    for name, loss in losses.terms.items():
        torch.testing.assert_close(loss, expected[name], rtol=1e-4, atol=1e-5, msg=name)
        pairs = zip(gradients_of(loss, model), gradients_of(expected[name], model), strict=True)
        for own, slow in pairs:
            torch.testing.assert_close(own, slow, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_an_irrelevant_state_has_exactly_no_gradient(make_mixed: Make, ends: Any) -> None:
    model, rollout = Table(), make_mixed(**ends)
    found = betas(model, rollout)
    threshold = middle_of(found[:, REPLAYED])
    irrelevant = (found > threshold) & rollout.replayed[1:]
    terms = laser(model, replay_kl_threshold=threshold).algo.losses(rollout).terms
    policy = gradients_of(terms["pg_loss"], model)[0]
    value = gradients_of(terms["baseline_loss"], model)[1]
    entropy = gradients_of(terms["entropy_loss"], model)[0]
    moved = policy[: T * B].any(-1).view(T, B)
    assert moved.equal(~irrelevant)
    assert value[: T * B].bool().view(T, B).equal(~irrelevant)
    assert entropy[: T * B].any(-1).view(T, B).equal(~rollout.replayed[1:])


def test_an_irrelevant_action_that_the_policy_rules_out_reaches_no_loss_or_gradient(
    make_mixed: Make,
) -> None:
    """Its log-probability is -inf, and 0 times that is NaN."""
    model, rollout = Table(), make_mixed()
    row, column = 3, REPLAYED[0]
    rollout.action[row, column] = 0
    rollout.extras["policy_logits"][row, column] = torch.tensor([9.0, -9.0, -9.0])
    with torch.no_grad():
        model.policy[(row - 1) * B + column] = torch.tensor([-math.inf, 0.0, 5.0])
    terms = laser(model).algo.losses(rollout).terms
    for loss in terms.values():
        assert all(tensor.isfinite().all() for tensor in (loss, *gradients_of(loss, model)))
    policy = gradients_of(terms["pg_loss"], model)[0]
    assert policy.any() and not policy[(row - 1) * B + column].any()


@pytest.mark.parametrize("row", range(1, T + 1))
@pytest.mark.parametrize("end", ["none", "terminated", "truncated", "the row before"])
def test_the_behaviour_of_a_row_decides_about_the_state_before_it(
    make_mixed: Make, row: int, end: str
) -> None:
    """Policies are equal everywhere else; episodes end around that row."""
    column = REPLAYED[1]
    places = {"none": {}, "the row before": {"truncated": [(row - 1, column)]}}
    ends: Any = places.get(end, {end: [(row, column)]})
    model, rollout = Table(), make_mixed(**ends)
    learning = model.policy[: T * B].view(T, B, ACTIONS).detach()
    rollout.extras["policy_logits"][1:] = learning
    learning[row - 1, column] = torch.tensor([9.0, -9.0, 0.0])
    rollout.extras["policy_logits"][row, column] = torch.tensor([-9.0, 9.0, 0.0])
    losses = laser(model).algo.losses(rollout)
    policy = gradients_of(losses.terms["baseline_loss"], model)[1]
    still = (policy[: T * B] == 0).view(T, B).nonzero().tolist()
    assert still == [[row - 1, column]]


def test_every_state_of_an_online_column_is_learnt_from(make_mixed: Make) -> None:
    model, rollout = Table(), make_mixed()
    rollout.extras["policy_logits"][1:] = -20 * model.policy[: T * B].view(T, B, ACTIONS).detach()
    losses = laser(model, replay_kl_threshold=1e-6).algo.losses(rollout)
    value = gradients_of(losses.terms["baseline_loss"], model)[1]
    learnt = value[: T * B].bool().view(T, B)
    assert not learnt[:, REPLAYED].any()
    assert learnt[:, :2].all()


def figures_and_weights(step: OptimiserStep[Any], rollout: Rollout) -> tuple[Any, Any]:
    metrics = [step.update(rollout).metrics for _ in range(3)]
    return metrics, copy.deepcopy(step.algo.actor.state_dict())


@pytest.mark.parametrize("replayed", [None, columns()], ids=["None", "all false"])
@pytest.mark.parametrize("use_lstm", [False, True])
def test_laser_without_replayed_columns_is_bit_equal_to_impala(
    make_rollout: Make, replayed: Tensor | None, use_lstm: bool
) -> None:
    model = mlp(use_lstm)
    ends = {"terminated": [(2, 0)], "truncated": [(3, 1), (T, 2)]}
    rollout = make_rollout(T, B, state=model.initial_state(B), **ends)
    theirs = figures_and_weights(laser(copy.deepcopy(model), IMPALA), rollout)
    marked = dataclasses.replace(rollout, replayed=replayed)
    ours = figures_and_weights(laser(model, replay_kl_threshold=1e-6), marked)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)


@pytest.mark.parametrize("threshold", [1e9, math.inf])
def test_laser_is_bit_equal_to_plain_vtrace_where_all_is_relevant(
    make_mixed: Make, threshold: float
) -> None:
    model, rollout = Table(), make_mixed(**ENDS["both"])
    theirs = laser(copy.deepcopy(model), IMPALA, entropy_cost=0.0)
    ours = laser(model, entropy_cost=0.0, replay_kl_threshold=threshold)
    online = dataclasses.replace(rollout, replayed=None)
    found, expected = ours.algo.losses(rollout), theirs.algo.losses(online)
    for name in ("pg_loss", "baseline_loss"):
        assert torch.equal(found.terms[name], expected.terms[name])
    ours.update(rollout)
    theirs.update(online)
    torch.testing.assert_close(
        ours.algo.actor.state_dict(), theirs.algo.actor.state_dict(), rtol=0, atol=0
    )


def test_an_infinite_threshold_accepts_an_infinite_kl(make_mixed: Make) -> None:
    model, rollout = Table(), make_mixed()
    rollout.extras["policy_logits"][2, 3] = torch.tensor([0.0, 0.0, -math.inf])
    rollout.action[2, 3] = 0
    found = laser(model, replay_kl_threshold=math.inf).algo.losses(rollout).metrics
    assert found["relevant_share"].total == found["relevant_share"].steps == T * len(REPLAYED)
    assert found["replay_kl"].steps == T * len(REPLAYED) - 1
    assert found["replay_kl"].total.isfinite()
    found = laser(model, replay_kl_threshold=1e9).algo.losses(rollout).metrics
    assert found["relevant_share"].total == T * len(REPLAYED) - 1


def test_entropy_and_env_steps_count_online_columns_only(make_mixed: Make) -> None:
    model = Table()
    step = laser(model, total_steps=4 * 2 * T, learning_rate=0.1)
    rollout = make_mixed()
    policies = model.policy[: T * B].view(T, B, ACTIONS).detach()[:, :2]
    entropies = -(policies.softmax(-1) * policies.log_softmax(-1)).sum(-1)
    metrics = step.update(rollout).metrics
    assert metrics["entropy"] == pytest.approx(entropies.mean().item())
    assert metrics["entropy_loss"] == pytest.approx(-0.01 * entropies.sum().item())
    assert metrics["learning_rate"] == pytest.approx(0.1)
    assert step.update(rollout).metrics["learning_rate"] == pytest.approx(0.075)
    assert (step.counters.env_steps, step.counters.learnt_steps) == (2 * T * 2, 2 * T * B)


class Means(LASER):
    """A variant whose terms are means over the steps."""

    reduction = "mean"


@pytest.mark.parametrize(
    ("kind", "use_lstm", "num_threads", "width", "is_masked"),
    [
        (LASER, False, 1, 1, False),
        (LASER, True, 1, 2, True),
        (Means, False, 3, 1, True),
        (Means, True, 3, 2, False),
    ],
)
def test_slices_and_threads_learn_and_report_what_the_whole_does(
    make_rollout: Make, kind: Kind, use_lstm: bool, num_threads: int, width: int, is_masked: bool
) -> None:
    """Some slices have online columns only, others replayed ones only."""
    model = mlp(use_lstm)
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[2, 0] = valid[3:5, 3] = valid[1, 4] = False
    rollout = make_rollout(
        T,
        B,
        **ENDS["both"],
        state=map_leaves(torch.randn_like, model.initial_state(B)),
        replayed=columns(*REPLAYED),
        collected=2 * T,
        valid=valid if is_masked else None,
    )
    settings = {"replay_kl_threshold": 0.1, "entropy_cost": 0.1}
    whole = laser(copy.deepcopy(model), kind, **settings)
    cut = {"bytes_at_once": width * COLUMN, "num_threads": num_threads}
    parts = laser(model, kind, **settings, **cut)
    found, expected = parts.update(rollout).metrics, whole.update(rollout).metrics
    assert {"relevant_share", "replay_kl", "entropy"} <= set(expected)
    assert 0.1 < expected["relevant_share"] < 0.9
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, parameter in whole.algo.actor.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("bytes_at_once", [None, 1])
def test_metrics_are_means_over_the_valid_replayed_steps(
    make_mixed: Make, bytes_at_once: int | None
) -> None:
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[0, 2] = valid[2, 0] = valid[3:5, 3] = False
    model, rollout = Table(), make_mixed(valid=valid)
    counted = valid[1:] & rollout.replayed[1:]
    found = betas(model, rollout)[counted]
    threshold = middle_of(found)
    step = laser(model, replay_kl_threshold=threshold, bytes_at_once=bytes_at_once)
    metrics = step.update(rollout).metrics
    assert metrics["relevant_share"] == (found < threshold).float().mean().item() == 0.5
    assert metrics["replay_kl"] == pytest.approx(found.mean().item(), rel=1e-4)


def test_nothing_is_reported_where_no_replayed_step_is_learnt_from(make_mixed: Make) -> None:
    valid = torch.ones(T + 1, B, dtype=torch.bool)
    valid[:, REPLAYED] = False
    for rollout in (
        make_mixed(replayed=None),
        make_mixed(replayed=columns()),
        make_mixed(valid=valid),
    ):
        for bytes_at_once in (None, 1):
            metrics = laser(bytes_at_once=bytes_at_once).update(rollout).metrics
            assert not {"relevant_share", "replay_kl"} & set(metrics)
            assert "entropy" in metrics and all(map(math.isfinite, metrics.values()))
    only_replayed = laser().update(make_mixed(replayed=columns(*range(B)))).metrics
    assert "entropy" not in only_replayed and only_replayed["entropy_loss"] == 0.0


def test_running_statistics_see_online_columns_only(make_rollout: Make) -> None:
    unbounded = ArraySpec((4,), "float32", -math.inf, math.inf)
    model = MLPNet(unbounded, Discrete(ACTIONS), False)
    rollout = make_rollout(T, B, replayed=columns(*REPLAYED))
    rollout.observation[:, REPLAYED] += 100.0
    laser(model).update(rollout)
    statistics = dict(model.named_buffers())
    assert statistics["scale.count"] == 2 * T
    online = rollout.observation[1:, :2].reshape(-1, 4)
    torch.testing.assert_close(statistics["scale.mean"].float(), online.mean(0))


@pytest.mark.parametrize("field", ["policy", "behaviour"])
def test_a_nan_is_noticed_and_not_taken_for_irrelevant(make_mixed: Make, field: str) -> None:
    model, rollout = Table(), make_mixed()
    if field == "policy":
        with torch.no_grad():
            model.policy[3 * B + 4] = math.nan
    else:
        rollout.extras["policy_logits"][4, 4] = math.nan
    with pytest.raises(NonFiniteError, match="pg_loss is nan"):
        laser(model).update(rollout)


JOINT = [
    MultiDiscrete((2, 3)),
    MultiBinary((3,)),
    (Discrete(2), {"b": MultiBinary((2,)), "a": MultiDiscrete((3, 2))}),
]


@pytest.mark.parametrize("space", JOINT, ids=str)
def test_joint_actions_are_learnt_from_replay(make_rollout: Make, space: Any) -> None:
    model = MLPNet(ArraySpec((4,), "float32"), space, False)
    model.distribution = distribution_for(space)
    params = 3 * torch.randn(T + 1, B, model.distribution.num_params)
    rollout = make_rollout(
        T,
        B,
        action=model.distribution.sample(params),
        extras={"policy_logits": params},
        replayed=columns(*REPLAYED),
    )
    metrics = laser(model).update(rollout).metrics
    assert metrics["replay_kl"] > 0.1
    assert metrics["relevant_share"] < 1.0


@pytest.mark.parametrize(
    "space", [Box(-1.0, 1.0, (2,)), (Discrete(2), Box(-1.0, 1.0, (2,))), MultiBinary((12,))]
)
def test_a_space_without_relevance_is_refused_unless_there_is_no_trust_region(
    make_rollout: Make, space: Any
) -> None:
    model = MLPNet(ArraySpec((4,), "float32"), space, False)
    model.distribution = distribution_for(space)
    with pytest.raises(
        UsageError, match="more than 1,024 joint actions: use replay_kl_threshold inf"
    ):
        laser(model)
    params = torch.randn(T + 1, B, model.distribution.num_params)
    rollout = make_rollout(
        T,
        B,
        action=model.distribution.sample(params),
        extras={"policy_logits": params},
        replayed=columns(*REPLAYED),
    )
    theirs = laser(copy.deepcopy(model), IMPALA).update(rollout).metrics
    assert laser(model, replay_kl_threshold=math.inf).update(rollout).metrics == theirs


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_an_impossible_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"replay_kl_threshold must be greater than 0\.?0?, got"):
        LASERConfig(replay_kl_threshold=threshold)
    with pytest.raises(ValueError, match="discounting must be between"):
        LASERConfig(discounting=2.0)
