# SPDX-License-Identifier: Apache-2.0
"""R2D2's targets, gradients and priorities, compared with the paper's equations as loops."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.config import R2D2Config, StepConfig
from torchbeast.core.algos.r2d2 import R2D2, rescaled, unscaled
from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.errors import UsageError

T, B, BURN_IN, ACTIONS, SIZE = 8, 5, 3, 3, 4
GAMMA, N, ETA = 0.9, 3, 0.9
EPS = 1e-3
# Rows and columns: within burn-in, right after it, neighbours, and the last row; none is BURN_IN.
TERMINATED = [(0, 0), (2, 0), (4, 3), (8, 1)]
TRUNCATED = [(1, 1), (2, 2), (4, 2), (5, 1), (6, 1), (6, 3), (8, 0)]
INVALID = [(2, 4), (5, 3), (6, 4), (8, 2)]
STATE = tuple[Tensor, Tensor]


def made(core: str = "lstm", **settings: Any) -> R2D2:
    given = {"discounting": GAMMA, "burn_in": BURN_IN, **settings}
    spec = ActorSpec("r2d2-mlp", {"hidden": 8, "core": core}, use_lstm=True)
    agent = make_agent(spec, ArraySpec((SIZE,), "float32"), Discrete(ACTIONS), 1)
    algo = R2D2(agent.model, R2D2Config(**given))
    algo.n_step = N
    with torch.no_grad():
        for parameter in algo.target.network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        agent.model.baseline.bias.add_(2.0)  # so that h matters
    return algo


@pytest.fixture
def batch(make_rollout: Callable[..., Rollout], request: pytest.FixtureRequest) -> Rollout:
    """A batch without invalid steps, or with those of the parameter."""
    shape, invalid = (T + 1, B), getattr(request, "param", [])
    valid = torch.ones(shape, dtype=torch.bool)
    for place in invalid:
        valid[place] = False
    size = flatten(made().actor.initial_state(1))[0].shape[-1]
    return make_rollout(
        T,
        B,
        size=SIZE,
        terminated=TERMINATED,
        truncated=TRUNCATED,
        valid=valid if invalid else None,
        extras={"core_state": 0.5 * torch.randn(*shape, 2 * size)},
        weights=torch.tensor([1.0, 1.0, 0.4, 0.25, 0.7]).repeat(T + 1, 1),
        state=(torch.full((1, B, size), torch.nan),) * 2,  # of a window, nobody knows it
    )


masked = pytest.mark.parametrize("batch", [[], INVALID], ids=["", "masked"], indirect=True)


def h(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + EPS * x


def h_inverse(x: float) -> float:
    root = (math.sqrt(1 + 4 * EPS * (abs(x) + 1 + EPS)) - 1) / (2 * EPS)
    return math.copysign(root**2 - 1, x)


def rows_of(batch: Rollout, b: int) -> Iterator[tuple[int, ModelInputs]]:
    for t in range(T + 1):
        here = slice(t, t + 1), slice(b, b + 1)
        leaves = (batch.observation, batch.reward, batch.done, batch.action)
        yield t, ModelInputs(*(leaf[here] for leaf in leaves))


def double_values(algo: R2D2, batch: Rollout, b: int) -> tuple[list[Tensor], list[float], Any]:
    """Q [A] of each row; what the target network says of the best action in each row, and in the
    final observation of each truncated row.
    """
    networks = algo.actor, algo.target.network
    states = [algo.actor.state_of(batch.extras["core_state"][0, b : b + 1])] * 2
    finals = {place: i for i, place in enumerate(sorted(TRUNCATED, key=lambda p: (p[1], p[0])))}
    values, best, of_finals = [], [], {}
    for t, inputs in rows_of(batch, b):
        if t == BURN_IN:
            states = [map_leaves(Tensor.detach, state) for state in states]
        if t > 0 and batch.truncated[t, b]:
            last = batch.final_observation[finals[t, b]].view(1, 1, -1)
            seen = inputs._replace(observation=last, done=torch.zeros(1, 1, dtype=torch.bool))
            own, other = (n(seen, s)[0][0, 0] for n, s in zip(networks, states, strict=True))
            of_finals[t] = other[own.argmax()].item()
        outputs = [network(inputs, s) for network, s in zip(networks, states, strict=True)]
        states = [output.core_state for output in outputs]
        own, other = (output.policy_logits[0, 0] for output in outputs)
        values.append(own)
        best.append(other[own.argmax()].item())
    return values, best, of_finals


def errors_of_the_paper(algo: R2D2, batch: Rollout, b: int) -> list[Tensor]:
    """y - Q of each step that is trained on. Returns are summed until the episode's end, an invalid
    step or the last row, but over n steps at most.
    """
    values, best, of_finals = double_values(algo, batch, b)
    errors = []
    for t in range(BURN_IN, T):
        if batch.valid is not None and not batch.valid[t + 1, b]:
            continue
        total, last = 0.0, t
        for k in range(N):
            if last == T or (batch.valid is not None and not batch.valid[last + 1, b]):
                total += GAMMA**k * h_inverse(best[last])
                break
            total += GAMMA**k * batch.reward[last + 1, b].item()
            last += 1
            if batch.truncated[last, b]:
                total += GAMMA ** (k + 1) * h_inverse(of_finals[last])
            if batch.done[last, b]:
                break
        else:
            total += GAMMA**N * h_inverse(best[last])
        errors.append(h(total) - values[t][batch.action[t + 1, b]])
    return errors


@masked
def test_loss_and_gradient_are_those_of_the_papers_equations(batch: Rollout) -> None:
    algo = made()
    loss = algo.losses(algo.prepare(batch)).terms["value_loss"]
    loss.backward()
    found = [parameter.grad.clone() for parameter in algo.actor.parameters()]
    algo.actor.zero_grad()
    assert batch.weights is not None
    terms = [
        weight * 0.5 * error**2
        for b, weight in enumerate(batch.weights[0])
        for error in errors_of_the_paper(algo, batch, b)
    ]
    expected = torch.stack(terms).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for gradient, parameter in zip(found, algo.actor.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@masked
def test_priorities_mix_the_largest_and_the_mean_error(batch: Rollout) -> None:
    algo = made()
    priorities = algo.losses(algo.prepare(batch)).feedback.priorities
    assert priorities is not None
    for b in range(B):
        sizes = [abs(error.item()) for error in errors_of_the_paper(algo, batch, b)]
        expected = ETA * max(sizes) + (1 - ETA) * sum(sizes) / len(sizes)
        assert priorities[b].item() == pytest.approx(expected, rel=1e-4)


@masked
def test_slices_of_columns_have_the_loss_of_the_batch(batch: Rollout) -> None:
    algo = made()
    prepared = algo.prepare(batch)
    whole = algo.losses(prepared).terms["value_loss"]
    parts = [(part.num_steps, algo.losses(part).terms["value_loss"]) for part in prepared.split(2)]
    total = sum(steps * loss for steps, loss in parts) / prepared.num_steps
    torch.testing.assert_close(total, whole)
    assert prepared.env_steps == batch.env_steps == T * B, "steps of burn-in are collected too"


def test_the_target_network_is_copied_when_it_is_time(batch: Rollout) -> None:
    algo = made(target_period=2)
    step = OptimiserStep(algo, StepConfig(), total_steps=1000)
    for is_equal in (False, True, False):
        step.update(batch)
        pairs = zip(algo.actor.parameters(), algo.target.network.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == is_equal


def test_a_resumed_learner_continues_bit_by_bit(batch: Rollout) -> None:
    """The number of steps since the target network was copied is saved too."""
    steps = [OptimiserStep(made(target_period=3), StepConfig(), total_steps=1000) for _ in range(2)]
    for _ in range(2):
        steps[0].update(batch)
    steps[1].load_state_dict(copy.deepcopy(steps[0].state_dict()))
    results = [[step.update(batch) for _ in range(3)] for step in steps]
    for before, after in zip(*results, strict=True):
        assert before.metrics == after.metrics
        assert before.feedback.priorities is not None and after.feedback.priorities is not None
        assert torch.equal(before.feedback.priorities, after.feedback.priorities)


@pytest.mark.parametrize("x", [0.0, 1e-4, -0.3, 1.0, -17.5, 300.0, -1e5])
def test_rescaling_is_h_and_its_inverse_brings_values_h_inverse(x: float) -> None:
    assert rescaled(torch.tensor(x)).item() == pytest.approx(h(x), rel=1e-5, abs=1e-7)
    assert unscaled(torch.tensor(x)).item() == pytest.approx(h_inverse(x), rel=1e-5, abs=1e-7)
    assert unscaled(rescaled(torch.tensor(x))).item() == pytest.approx(x, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("core", ["lstm", "gru", "gtrxl"])
def test_the_stored_state_is_the_one_that_the_same_network_computes_again(core: str) -> None:
    """Row t's extra is the state that row t is seen with, over the border of an episode."""
    actor = made(core).actor
    rows, state = 7, actor.initial_state(B)
    done = torch.zeros(rows, B, dtype=torch.bool)
    done[0], done[3, 1], done[4, 2] = True, True, True
    seen = [
        ModelInputs(
            torch.randn(1, B, SIZE), torch.randn(1, B), done[t : t + 1], torch.zeros(1, B).long()
        )
        for t in range(rows)
    ]
    stored = [torch.zeros(B, actor.extra_specs["core_state"].shape[0])]
    for inputs in seen:
        acted = actor.act(inputs, state, "explore")
        stored.append(acted.extras["core_state"][0])
        state = acted.state
    together = ModelInputs(*(torch.cat(leaves) for leaves in zip(*seen, strict=True)))
    for t in (0, 2, 4):
        rest = ModelInputs(*(leaf[t:] for leaf in together))
        after = actor(rest, actor.state_of(stored[t].clone())).core_state
        for again, leaf in zip(flatten(after), flatten(state), strict=True):
            torch.testing.assert_close(again, leaf)


def test_values_are_those_of_a_dueling_network() -> None:
    actor: Any = made().actor
    inputs = ModelInputs(
        torch.randn(2, B, SIZE),
        torch.randn(2, B),
        torch.ones(2, B).bool(),
        torch.zeros(2, B).long(),
    )
    values, largest, _ = actor(inputs, actor.initial_state(B))
    features, _ = actor._run(inputs, actor.initial_state(B), actor)
    advantages = actor.policy(features)
    centred = advantages - advantages.mean(-1, keepdim=True)
    torch.testing.assert_close(values, actor.baseline(features) + centred)
    torch.testing.assert_close(largest, values.amax(-1))


def test_in_a_ladder_each_environment_has_an_epsilon_of_its_own() -> None:
    actor = made().actor
    actor.epsilon.fill_(0.4)
    actor.env_index = torch.arange(8)
    epsilons = actor.ladder()
    golden = (math.sqrt(5) - 1) / 2
    expected = [0.4 ** (1 + 7 * (i * golden % 1)) for i in range(8)]
    torch.testing.assert_close(epsilons, torch.tensor(expected))
    assert max(expected) == pytest.approx(0.4) and min(expected) < 0.002


def test_random_actions_are_as_frequent_as_the_ladder_says() -> None:
    actor, count = made().actor, 20_000
    actor.epsilon.fill_(0.5)
    actor.env_index = torch.tensor([0, 1]).repeat_interleave(count)
    kept, others = torch.zeros(2 * count), torch.ones(2 * count)
    shares = actor.randomly(kept, others, "ladder").view(2, count).mean(1)
    torch.testing.assert_close(shares, actor.ladder()[[0, count]], rtol=0.1, atol=0.01)
    same = actor.randomly(kept, others, "explore").view(2, count).mean(1)
    torch.testing.assert_close(same, torch.tensor([0.5, 0.5]), rtol=0.05, atol=0.0)


@pytest.mark.parametrize(
    ("actions", "use_lstm", "message"),
    [
        (Discrete(2), False, "r2d2 needs a network with memory: set use_lstm, or use algo dqn"),
        (Box((1,), (-1.0,), (1.0,)), True, "needs a Discrete action space"),
    ],
)
def test_networks_without_memory_or_for_other_actions_are_refused(
    actions: Any, use_lstm: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_agent(
            ActorSpec("r2d2-mlp", use_lstm=use_lstm), ArraySpec((SIZE,), "float32"), actions, 1
        )


def test_without_weights_all_steps_count_alike(batch: Rollout) -> None:
    algo = made()
    even, without = (
        dataclasses.replace(batch, weights=weights) for weights in (torch.ones(T + 1, B), None)
    )
    losses = [algo.losses(algo.prepare(b)).terms["value_loss"] for b in (even, without)]
    torch.testing.assert_close(*losses)


def test_each_environment_keeps_an_epsilon_of_its_own_unless_that_is_off() -> None:
    assert made().mode == "ladder" and made(epsilon_ladder=False).mode == "explore"
