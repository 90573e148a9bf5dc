# SPDX-License-Identifier: Apache-2.0
"""SAC, with numbers computed by the papers' formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.distributions import SquashedGaussian, distribution_for
from torchbeast.core.actors.off_policy import Critics, QNetwork, StochasticActorCritic
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.config import OptimiserConfig, SACConfig, StepConfig
from torchbeast.core.algos.sac import SAC
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.envs.tasks import with_task
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError

WIDTH = 2.0  # half of the box
W, LOG_STD = 0.5, -0.3  # the mean of u is w s
CRITICS = [(1.0, 2.0), (-1.0, 3.0)]  # Q_i(s, a) = u_i s + v_i a; they err to opposite sides
TARGETS = [(2.0, -1.0), (1.0, 1.0)]
ALPHA, GAMMA = 0.2, 0.9


class LinearCritics(Critics):
    def __init__(self, weights: list[tuple[float, float]]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, observation: Any, action: Tensor | None = None) -> Tensor:
        assert action is not None
        u, v = self.weights.unbind(-1)
        return u[:, None] * observation + v[:, None] * action.squeeze(-1)


class LinearPolicy(StochasticActorCritic):
    def __init__(self) -> None:
        super().__init__()
        self.distribution = SquashedGaussian(Box(-WIDTH, WIDTH, (1,)))
        self.w = nn.Parameter(torch.tensor(W))

    def forward(self, observation: Any) -> Tensor:
        return torch.stack([self.w * observation, torch.full_like(observation, LOG_STD)], -1)

    def make_critics(self) -> LinearCritics:
        return LinearCritics(CRITICS)


def transitions(**more: Any) -> Transitions:
    return Transitions(
        observation=torch.tensor([1.0, -2.0]),
        action=torch.tensor([[1.0], [-0.5]]),
        reward=torch.tensor([0.5, 1.0]),
        terminated=torch.tensor([False, True]),
        next_observation=torch.tensor([3.0, 1.0]),
        env_steps=1,
        **more,
    )


def algo_of(**settings: Any) -> SAC:
    config = SACConfig(discounting=GAMMA, temperature=ALPHA, reward_clipping="none", **settings)
    algo = SAC(LinearPolicy(), config)
    with torch.no_grad():
        algo.target.network.weights.copy_(torch.tensor(TARGETS))  # type: ignore[operator]
    return algo


def log_prob(u: float, mean: float) -> float:
    """The log-density of tanh(u) where u is normal; equation 26 of arXiv 1812.05905."""
    std = math.exp(LOG_STD)
    log_normal = -0.5 * ((u - mean) / std) ** 2 - LOG_STD - 0.5 * math.log(2 * math.pi)
    return log_normal - math.log(1 - math.tanh(u) ** 2)


def q(weights: list[tuple[float, float]], s: float, a: float) -> list[float]:
    return [u * s + v * a for u, v in weights]


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every normal variable is 0.7."""
    monkeypatch.setattr(torch, "randn_like", lambda leaf: torch.full_like(leaf, 0.7))


def sampled(s: float, w: float = W) -> tuple[float, float]:
    """The action in units of the box, and its log-density."""
    u = w * s + 0.7 * math.exp(LOG_STD)
    return math.tanh(u), log_prob(u, w * s)


def actor_loss(w: float) -> float:
    """Equation 9, at the given states."""
    total = 0.0
    for s in (1.0, -2.0):
        a, log_pi = sampled(s, w)
        total += ALPHA * log_pi - min(q(CRITICS, s, a))
    return total / 2


def test_the_three_losses_are_the_papers() -> None:
    weights = torch.tensor([0.5, 1.0])
    losses = algo_of().losses(transitions(weights=weights))
    after, log_pi = sampled(3.0)
    y = [0.5 + GAMMA * (min(q(TARGETS, 3.0, after)) - ALPHA * log_pi), 1.0]
    values = [q(CRITICS, 1.0, 1.0 / WIDTH), q(CRITICS, -2.0, -0.5 / WIDTH)]
    errors = [[value - y[b] for value in values[b]] for b in range(2)]
    squares = [0.5 * sum(error**2 for error in pair) for pair in errors]
    assert losses.terms["critic_loss"].item() == pytest.approx((0.5 * squares[0] + squares[1]) / 2)
    assert any(first * second < 0 for first, second in errors), "nothing would cancel"
    sizes = [(abs(first) + abs(second)) / 2 for first, second in errors]
    assert losses.feedback.priorities is not None
    assert losses.feedback.priorities.tolist() == pytest.approx(sizes, rel=1e-5)
    assert losses.terms["actor_loss"].item() == pytest.approx(actor_loss(W), rel=1e-5)
    entropy = -(sampled(1.0)[1] + sampled(-2.0)[1]) / 2
    expected = math.log(ALPHA) * (entropy - -1.0)
    assert losses.terms["temperature_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_the_policys_gradient_is_that_of_its_loss_through_the_sample() -> None:
    algo = algo_of()
    algo.losses(transitions()).terms["actor_loss"].backward()
    assert algo.actor.w.grad is not None
    numeric = (actor_loss(W + 1e-4) - actor_loss(W - 1e-4)) / 2e-4
    assert algo.actor.w.grad.item() == pytest.approx(numeric, rel=1e-3)


def test_the_temperature_falls_where_there_is_more_entropy_than_asked_for() -> None:
    for target, grows in ((-100.0, False), (100.0, True)):
        algo = algo_of(target_entropy=target)
        step = OptimiserStep(algo, StepConfig(), total_steps=100)
        step.update(transitions())
        assert (algo.temperature.log_alpha.item() > math.log(ALPHA)) == grows
    algo = algo_of(learn_temperature=False)
    OptimiserStep(algo, StepConfig(), total_steps=100).update(transitions())
    assert algo.temperature.log_alpha.item() == pytest.approx(math.log(ALPHA))


def test_a_temperature_that_is_not_learnt_is_that_of_the_config_after_a_checkpoint_too() -> None:
    for learns, expected in ((False, math.log(ALPHA)), (True, -9.0)):
        algo = algo_of(learn_temperature=learns)
        algo.temperature.log_alpha.data.fill_(-9.0)  # type: ignore[union-attr]
        OptimiserStep(algo, StepConfig(), total_steps=100)
        assert algo.temperature.log_alpha.item() == pytest.approx(expected)


def test_weight_decay_leaves_the_temperature_alone() -> None:
    algo = algo_of(optimiser=OptimiserConfig(optimiser="adamw", weight_decay=0.1))
    decays = {
        name: optimiser.param_groups[0]["weight_decay"]
        for name, optimiser in algo.optimisers.items()
    }
    assert decays == {"actor": 0.1, "critics": 0.1, "temperature": 0.0}


def test_each_optimiser_moves_its_own_network_and_the_target_follows() -> None:
    algo = algo_of(target_rate=0.25)
    before = algo.target.network.weights.clone()  # type: ignore[operator,union-attr]
    OptimiserStep(algo, StepConfig(), total_steps=100).update(transitions())
    assert algo.actor.w.item() != W
    now = algo.critics.weights.detach()  # type: ignore[operator,union-attr]
    assert not torch.equal(now, torch.tensor(CRITICS))
    torch.testing.assert_close(algo.target.network.weights, before + 0.25 * (now - before))


def test_actions_are_random_until_the_first_update() -> None:
    algo = algo_of()
    assert algo.actor.epsilon.item() == 1.0
    OptimiserStep(algo, StepConfig(), total_steps=100).update(transitions())
    assert algo.actor.epsilon.item() == 0.0


def test_a_network_that_has_learnt_before_does_not_act_at_random_again() -> None:
    algo = algo_of()
    algo.actor.epsilon.zero_()  # as the weights of an earlier run
    OptimiserStep(algo, StepConfig(), total_steps=100)
    assert algo.actor.epsilon.item() == 0.0


# --- discrete actions: three of them, in states 0 and 1

LOGITS = [[0.0, 1.0, -1.0], [0.5, 0.0, 2.0]]
TABLES = [[[1.0, 2.0, 3.0], [0.0, 1.0, 5.0]], [[2.0, 1.0, 4.0], [1.0, 0.0, 3.0]]]
TARGET_TABLES = [[[0.0, 1.0, 2.0], [3.0, 2.0, 1.0]], [[1.0, 0.0, 3.0], [2.0, 4.0, 0.0]]]


class TableCritics(Critics):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.tensor(TABLES))

    def forward(self, observation: Any, action: Tensor | None = None) -> Tensor:
        return self.tables[:, observation]


class TablePolicy(StochasticActorCritic):
    def __init__(self) -> None:
        super().__init__()
        self.distribution = distribution_for(Discrete(3))
        self.logits = nn.Parameter(torch.tensor(LOGITS))

    def forward(self, observation: Any) -> Tensor:
        return self.logits[observation]

    def make_critics(self) -> TableCritics:
        return TableCritics()


def policy(s: int) -> list[tuple[float, float]]:
    """Probabilities and their logarithms."""
    total = sum(math.exp(logit) for logit in LOGITS[s])
    probs = [math.exp(logit) / total for logit in LOGITS[s]]
    return [(p, math.log(p)) for p in probs]


def test_the_losses_of_discrete_actions_are_exact_expectations() -> None:
    config = SACConfig(discounting=GAMMA, temperature=ALPHA, reward_clipping="none")
    algo = SAC(TablePolicy(), config)
    with torch.no_grad():
        algo.target.network.tables.copy_(torch.tensor(TARGET_TABLES))  # type: ignore[operator]
    batch = Transitions(
        observation=torch.tensor([0, 1]),
        action=torch.tensor([2, 1]),
        reward=torch.tensor([0.5, 1.0]),
        terminated=torch.tensor([False, True]),
        next_observation=torch.tensor([1, 0]),
        env_steps=1,
    )
    terms = algo.losses(batch).terms
    after = [min(one, other) for one, other in zip(*(t[1] for t in TARGET_TABLES), strict=True)]
    pairs = zip(policy(1), after, strict=True)
    value = sum(p * (rated - ALPHA * log_p) for (p, log_p), rated in pairs)
    y = [0.5 + GAMMA * value, 1.0]
    errors = [[table[0][2] - y[0] for table in TABLES], [table[1][1] - y[1] for table in TABLES]]
    squares = [0.5 * sum(error**2 for error in pair) for pair in errors]
    assert terms["critic_loss"].item() == pytest.approx(sum(squares) / 2)
    expected, entropy = 0.0, 0.0
    for s in (0, 1):
        rated = [min(one, other) for one, other in zip(*(t[s] for t in TABLES), strict=True)]
        for (p, log_p), q_value in zip(policy(s), rated, strict=True):
            expected += p * (ALPHA * log_p - q_value) / 2
            entropy -= p * log_p / 2
    assert terms["actor_loss"].item() == pytest.approx(expected, rel=1e-5)
    surplus = entropy - 0.98 * math.log(3)
    assert terms["temperature_loss"].item() == pytest.approx(math.log(ALPHA) * surplus, rel=1e-4)


# --- networks


@pytest.mark.parametrize("space", [Box((-1.0, 0.0), (1.0, 6.0), (2,)), Discrete(3, 5)])
@pytest.mark.parametrize("body", ["mlp", "shallow", "fixup"])
def test_the_built_in_networks_learn(space: Any, body: str) -> None:
    seen = ArraySpec((5,), "float32") if body == "mlp" else ArraySpec((4, 40, 40), "uint8")
    actor = make_model(ActorSpec(f"sac-{body}"), seen, space)
    algo = SAC(actor, SACConfig(reward_clipping="none"))
    observation = torch.ones(3, *seen.shape, dtype=getattr(torch, seen.dtype))
    action = actor.distribution.sample(torch.zeros(3, actor.distribution.num_params))
    batch = Transitions(
        observation=observation,
        action=action,
        reward=torch.ones(3),
        terminated=torch.tensor([False, True, False]),
        next_observation=observation,
        env_steps=3,
    )
    before = [parameter.clone() for parameter in actor.parameters()]
    metrics = OptimiserStep(algo, StepConfig(), total_steps=100).update(batch).metrics
    assert all(math.isfinite(figure) for figure in metrics.values())
    moved = [not torch.equal(old, new) for old, new in zip(before, actor.parameters(), strict=True)]
    assert all(moved[-2:]) and any(moved[:-2])


def test_exploring_at_random_is_uniform_in_the_box() -> None:
    actor = make_model(
        ActorSpec("sac-mlp"), ArraySpec((5,), "float32"), Box((-1.0, 0.0), (1.0, 6.0), (2,))
    )
    assert isinstance(actor, StochasticActorCritic)
    chosen = actor.choose_each(torch.zeros(20_000, 4), "explore").action
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 6.0])
    assert (chosen >= low).all() and (chosen <= high).all()
    units = (chosen - low) / (high - low)
    for share in (0.1, 0.5, 0.9):
        assert (units < share).float().mean(0).tolist() == pytest.approx([share] * 2, abs=0.02)


def test_networks_and_spaces_that_do_not_fit_are_sentences() -> None:
    spec = ArraySpec((4,), "float32")
    with pytest.raises(
        ValueError, match="SACNet needs a Box or Discrete action space, got dict: use dqn"
    ):
        make_model(ActorSpec("sac-mlp"), spec, {"a": Discrete(2)})
    q_network = make_model(ActorSpec("q-mlp"), spec, Discrete(2))
    assert isinstance(q_network, QNetwork)
    with pytest.raises(UsageError, match="SAC needs a network of type StochasticActorCritic"):
        SAC(q_network, SACConfig())


def test_critics_do_not_see_the_number_of_the_task() -> None:
    plain, number = transitions(), torch.zeros(2, 1, dtype=torch.int32)
    names = ("observation", "next_observation")
    seen = {name: with_task(getattr(plain, name), number) for name in names}
    found = []
    for batch in (replace(plain, **seen), plain):
        torch.manual_seed(1)
        found.append(algo_of().losses(batch).terms)
    torch.testing.assert_close(*found)
