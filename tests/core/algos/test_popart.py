# SPDX-License-Identifier: Apache-2.0
"""PopArt: values in units of each task's statistics, which move without changing any value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import learners
import pytest
import torch
from torch import Tensor

from torchbeast.core import vtrace
from torchbeast.core.actors.contract import Actor, ActorCritic, ModelInputs, ModelOutput
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.config import IMPALAConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.laser import LASER
from torchbeast.core.algos.popart import PopArt
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.tasks import with_task
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import UsageError

T, B, TASKS = 5, 6, 3
Make = Callable[..., Rollout]


def network(num_tasks: int = TASKS, size: int = 4, hidden: int = 16) -> Actor:
    numbers = ArraySpec((size,), "float32", -1.0, 1.0)
    number = ArraySpec((1,), "int32", categories=(num_tasks,))
    space: Any = with_task(numbers, number) if num_tasks > 1 else numbers
    return make_model(ActorSpec("mlp", {"hidden": hidden}), space, Discrete(3))


def of_tasks(make: Make, tasks: list[int], **others: Any) -> Rollout:
    """Returns a rollout whose column b is of task tasks[b]."""
    plain = make(T, len(tasks), **others)
    finals = torch.tensor([tasks[column] for column in plain.truncations()[1]])

    def numbered(observation: Any, numbers: Tensor) -> Any:
        return with_task(observation, numbers.int().unsqueeze(-1))

    numbers = torch.tensor(tasks).expand(T + 1, -1)
    return Rollout(
        **plain.tensors()
        | {
            "observation": numbered(plain.observation, numbers),
            "final_observation": numbered(plain.final_observation, finals),
        }
    )


def learner(kind: type[IMPALA] = IMPALA, num_tasks: int = TASKS, **settings: Any) -> Any:
    make: Any = learners.ppo if issubclass(kind, PPO) else learners.impala
    settings = {"reward_clipping": "none", "popart": True, **settings}
    return make(network(num_tasks), kind, **settings)


def known(step: OptimiserStep[Any]) -> None:
    """Gives the learner statistics of many minibatches."""
    scale: Any = step.algo.scale  # type: ignore[attr-defined]
    scale.move(MEAN, DEVIATION)
    scale.minibatches.fill_(1000.0)


def values_of(step: OptimiserStep[Any], rollout: Rollout) -> Tensor:
    algo: Any = step.algo
    with torch.no_grad():
        return algo.scale.unrolled(unroll(algo.actor, rollout), rollout).baseline


MEAN = torch.tensor([0.5, -300.0, 2e3], dtype=torch.float64)
DEVIATION = torch.tensor([0.1, 1000.0, 30.0], dtype=torch.float64)


def test_the_first_minibatches_count_as_if_one_of_mean_0_and_deviation_1_had_come_before() -> None:
    scale, targets = PopArt(network(1), rate=1e-6), [4.0, -2.0, 7.0]
    for count, target in enumerate(targets, 1):
        normal = (target - scale.mean.item()) / scale.deviation.item()
        scale.adapt({"popart_target_0": normal, "popart_square_0": normal**2})
        mean = sum(targets[:count]) / (count + 1)
        square = (1 + sum(each * each for each in targets[:count])) / (count + 1)
        assert scale.mean.item() == pytest.approx(mean)
        assert scale.deviation.item() == pytest.approx((square - mean**2) ** 0.5)


def test_the_deviation_has_a_smallest_and_a_largest_value() -> None:
    scale = PopArt(network(1), rate=0.5)
    for _ in range(60):
        scale.adapt({"popart_target_0": 0.0, "popart_square_0": 0.0})
    assert scale.deviation.item() == pytest.approx(1e-4)
    scale.adapt({"popart_target_0": 0.0, "popart_square_0": 1e30})
    assert scale.deviation.item() == pytest.approx(1e6)


def test_no_value_changes_when_the_statistics_move(make_rollout: Make) -> None:
    step, rollout = learner(), of_tasks(make_rollout, [0, 1, 2, 0, 1, 2])
    before = values_of(step, rollout)
    step.algo.scale.move(MEAN, DEVIATION)
    assert torch.equal(step.algo.scale.deviation, DEVIATION)
    scale = torch.maximum(DEVIATION, MEAN.abs())[rollout.tasks].float()
    assert ((values_of(step, rollout) - before).abs() <= 1e-5 * scale.clamp(min=1.0)).all()
    step.algo.scale.move(torch.zeros(TASKS), torch.ones(TASKS))
    torch.testing.assert_close(values_of(step, rollout), before, rtol=1e-3, atol=1e-3)


def test_losses_and_statistics_are_those_of_the_papers_equations(make_rollout: Make) -> None:
    """Targets and advantages from values in units of returns, losses in units of the deviation."""
    step = learner(popart_rate=0.2, entropy_cost=0.0, discounting=0.9)
    known(step)
    tasks = [0, 2, 0, 2, 2, 0]  # none of task 1
    rollout = of_tasks(make_rollout, tasks, terminated=[(2, 0)])
    mean, deviation = MEAN[tasks].float(), DEVIATION[tasks].float()
    inputs = ModelInputs(rollout.observation, rollout.reward, rollout.done, rollout.action)
    logits, normal, _ = copy.deepcopy(step.algo.actor)(inputs, ())
    log_probs, behaviour = (
        step.algo.actor.distribution.log_prob(each, rollout.action[1:])
        for each in (logits[:-1], rollout.extras["policy_logits"][1:])
    )
    values = deviation * normal.detach() + mean
    targets, advantages = vtrace.from_importance_weights(
        log_rhos=log_probs - behaviour,
        discounts=0.9 * (1.0 - rollout.done[1:].float()),
        rewards=rollout.reward[1:],
        values=values[:-1],
        bootstrap_value=values[-1],
    )
    terms = step.algo.losses(rollout).terms
    errors = (targets - mean) / deviation - normal[:-1]
    torch.testing.assert_close(terms["baseline_loss"], 0.25 * errors.square().sum())
    torch.testing.assert_close(terms["pg_loss"], -(log_probs * advantages / deviation).sum())
    step.update(rollout)
    for task in range(TASKS):
        found, square = MEAN[task], DEVIATION[task] ** 2 + MEAN[task] ** 2
        columns = [column for column, number in enumerate(tasks) if number == task]
        if columns:
            seen = targets[:, columns].double()
            found = 0.8 * found + 0.2 * seen.mean()
            square = 0.8 * square + 0.2 * seen.square().mean()
        torch.testing.assert_close(step.algo.scale.mean[task], found, rtol=1e-5, atol=1e-5)
        expected = (square - found**2).sqrt()
        torch.testing.assert_close(step.algo.scale.deviation[task], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [IMPALA, PPO])
def test_the_first_targets_of_a_task_set_its_statistics_and_teach_nothing(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    step = learner(kind, entropy_cost=0.0, **({"num_mini_batch": 1} if kind is PPO else {}))
    rollout = of_tasks(make_rollout, [0, 1, 0, 1, 0, 1])
    rollout.reward.mul_(1000.0)
    minibatch = next(iter(step.algo.minibatches(step.algo.prepare(rollout))))
    terms = step.algo.losses(minibatch).terms
    assert terms["pg_loss"] == terms["baseline_loss"] == 0
    step.update(rollout)
    seen = step.algo.scale.minibatches
    assert (seen[:2] > 0).all() and seen[2] == 0
    assert (step.algo.scale.deviation[:2] > 300).all() and step.algo.scale.deviation[2] == 1
    assert step.algo.losses(minibatch).terms["baseline_loss"] > 0


def test_ppo_normalises_advantages_over_the_tasks_that_it_learns_from(make_rollout: Make) -> None:
    step = learner(PPO, num_mini_batch=1)
    known(step)
    step.algo.scale.minibatches[1] = 0
    minibatch = next(step.algo.minibatches(step.algo.prepare(of_tasks(make_rollout, [0, 1] * 3))))
    advantages, is_new = minibatch.extras["advantages"][1], minibatch.tasks[1] == 1
    assert not advantages[is_new].any()
    learnt = advantages[~is_new]
    assert learnt.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert learnt.std(correction=0).item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("kind", [IMPALA, PPO])
def test_a_peers_wrong_number_of_a_task_moves_no_statistics(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    step = learner(kind, **({"num_mini_batch": 1} if kind is PPO else {}))
    step.update(of_tasks(make_rollout, [0, 7, -1, 0]))
    assert (step.algo.scale.minibatches > 0).tolist() == [True, False, False]


def test_ppos_losses_are_in_units_of_each_tasks_deviation(make_rollout: Make) -> None:
    step = learner(PPO, popart_rate=0.2, normalise_advantages=False, num_mini_batch=1)
    known(step)
    rollout = of_tasks(make_rollout, [0, 1, 2, 0, 1, 2], truncated=[(3, 1)])
    batch = step.algo.prepare(rollout)
    targets, old = (batch.extras[name][1:] for name in ("value_targets", "old_values"))
    torch.testing.assert_close(old, values_of(step, rollout)[:-1])
    deviation = DEVIATION[rollout.tasks[1:]].float()
    minibatch = next(step.algo.minibatches(batch))
    assert minibatch.batch_size == T * B
    of_all = sorted(((targets - old) / deviation).flatten().tolist())
    assert sorted(minibatch.extras["advantages"][1].tolist()) == pytest.approx(of_all, rel=1e-4)
    assert sorted(minibatch.tasks[1].tolist()) == sorted(rollout.tasks[1:].flatten().tolist())
    loss = step.algo.losses(minibatch).terms["baseline_loss"]
    expected = 0.25 * ((targets - old) / deviation).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [IMPALA, LASER, PPO])
def test_one_task_with_fixed_statistics_learns_bit_by_bit_as_without(
    make_rollout: Make, kind: type[IMPALA]
) -> None:
    fixed, plain = learner(kind, 1, popart_rate=0.0), learner(kind, 1, popart=False)
    plain.algo.actor.load_state_dict(fixed.algo.actor.state_dict())
    rollouts = [make_rollout(T, B, truncated=[(2, 0)], terminated=[(3, 1)]) for _ in range(3)]
    for step in (fixed, plain):
        torch.default_generator.manual_seed(1)  # of shuffled minibatches
        for rollout in rollouts:
            step.update(rollout)
    ours, theirs = fixed.algo.actor.state_dict(), plain.algo.actor.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_resumed_learner_continues_bit_by_bit(make_rollout: Make) -> None:
    step, rollout = learner(), of_tasks(make_rollout, [0, 1, 2, 0, 1, 2])
    step.update(rollout)
    other = learner()
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    assert not torch.equal(other.algo.scale.mean, torch.zeros(TASKS))
    for each in (step, other):
        each.update(rollout)
    ours, theirs = step.state_dict(), other.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_reward_of_nan_fails_also_among_the_first_targets_of_a_task(make_rollout: Make) -> None:
    step, rollout = learner(), of_tasks(make_rollout, [0, 1, 2, 0, 1, 2])
    rollout.reward[-1, 1] = math.nan  # what the network says of this row is not trained
    with pytest.raises(NonFiniteError, match="loss is nan"):
        step.update(rollout)
    assert step.algo.scale.mean.isfinite().all() and not step.algo.scale.minibatches.any()


def test_a_network_without_a_value_layer_is_refused() -> None:
    class OneLayer(ActorCritic):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.nn.Linear(4, 4)

        def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
            outputs = self.both(inputs.observation)
            return ModelOutput(outputs[..., :3], outputs[..., 3], core_state)

    with pytest.raises(UsageError, match="attribute `baseline`"):
        learners.impala(OneLayer(), popart=True)


def test_returns_are_normalised_in_one_way() -> None:
    with pytest.raises(ValueError, match="remove one"):
        IMPALAConfig(popart=True, normalise_returns=True)


# --- two tasks, of which one gives a thousand times the rewards of the other

_CONTEXTS = 5  # of each task: which of three actions is right depends on them


def shares_of_right_actions(popart: bool, updates: int = 100) -> list[float]:
    """Returns how often each task takes the right action, after some updates."""
    actor: Any = network(2, size=2 * _CONTEXTS, hidden=32)
    settings = {"optimiser": "adam", "learning_rate": 3e-3, "epsilon": 1e-8, "total_steps": 10**9}
    step = learners.impala(
        actor, reward_clipping="none", popart=popart, grad_norm_clipping=1.0, **settings
    )
    columns = 2 * _CONTEXTS
    contexts = (torch.eye(columns) + torch.rand(columns, columns)).expand(T + 1, -1, -1)
    tasks = (torch.arange(columns) // _CONTEXTS).expand(T + 1, -1)
    right, rewards = torch.arange(columns) % 3, 1000.0 ** tasks.float()
    observation = with_task(contexts, tasks.int().unsqueeze(-1))
    done, nothing = torch.ones(T + 1, columns, dtype=torch.bool), torch.zeros(T + 1, columns)
    numbers = torch.zeros(T + 1, columns, dtype=torch.int64)
    for _ in range(updates):
        inputs = ModelInputs(observation, nothing, done, numbers)
        with torch.no_grad():
            logits = actor(inputs, ()).policy_logits
        action = actor.distribution.sample(logits).roll(1, 0)
        rollout = Rollout(
            observation=observation,
            reward=torch.where(action == right, rewards, 0.0),
            done=done,
            episode_step=numbers.int(),
            episode_return=nothing,
            action=action,
            extras={"policy_logits": logits.roll(1, 0)},
            initial_agent_state=(),
            truncated=~done,
            episode_end=done,
            policy_version=numbers,
            final_observation=map_leaves(lambda leaf: leaf[0, :0], observation),
            env_index=numbers,
            rollout_index=numbers,
        )
        step.update(rollout)
    probabilities = logits[0].softmax(-1).gather(-1, right.unsqueeze(-1)).view(2, _CONTEXTS)
    return probabilities.mean(1).tolist()


def test_both_tasks_learn_though_their_rewards_differ_by_a_thousand() -> None:
    small, large = shares_of_right_actions(popart=True)
    assert min(small, large) > 0.7
    without, _ = shares_of_right_actions(popart=False)
    assert without < 0.5
