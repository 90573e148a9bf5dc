# SPDX-License-Identifier: Apache-2.0
"""The toy off-policy algorithm, with numbers computed by hand, on the step, counters and state that
all algorithms share.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from typing import Any

import pytest
import torch
from learners import impala
from off_policy import (
    ACTOR_RATE,
    CRITIC_RATE,
    LinearActor,
    Toy,
    ToyConfig,
    random_transitions,
    two_transitions,
)

from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.optimisers import Adam
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.errors import UsageError


def toy(momentum: float = 0.0, total_steps: int = 10, **settings: Any) -> Any:
    algo = Toy(LinearActor(), ToyConfig(momentum=momentum))
    return OptimiserStep(algo, StepConfig(), total_steps=total_steps, **settings)


def numbers(module: Any) -> list[float]:
    return [parameter.item() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "slices", [{}, {"bytes_at_once": 1}, {"bytes_at_once": 1, "num_threads": 2}]
)
def test_each_optimiser_minimises_its_own_terms_in_its_own_network(slices: dict[str, int]) -> None:
    """The second transition ended, so its target is its reward.

    targets: 0.5 + 0.5 (2 + 2 * 0.5 * 2) = 2.5, and 1;  values: 1 + 2 = 3, and 2 - 2 = 0
    du = mean(0.5 * 1, -1 * 2) = -0.75;  dv = mean(0.5 * 1, -1 * -1) = 0.75;  dw = -2 * 1.5 = -3
    """
    step = toy(**slices)
    metrics = step.update(two_transitions()).metrics
    assert numbers(step.algo.actor) == pytest.approx([0.5 + 0.01 * 3])
    assert numbers(step.algo.critic) == pytest.approx([1 + 0.1 * 0.75, 2 - 0.1 * 0.75])
    assert numbers(step.algo.target) == pytest.approx([1 + 0.25 * 0.075, 2 - 0.25 * 0.075])
    assert metrics == pytest.approx(
        {
            "critic_loss": 0.5 * (0.25 + 1) / 2,
            "actor_loss": -3.0,
            "total_loss": 0.3125 - 3,
            "value": 1.5,
            "critic_grad_norm": math.hypot(0.75, 0.75),
            "actor_grad_norm": 3.0,
            "critic_learning_rate": CRITIC_RATE,
            "actor_learning_rate": ACTOR_RATE,
        }
    )


def test_each_optimisers_gradient_is_clipped_by_its_own_norm() -> None:
    algo = Toy(LinearActor(), ToyConfig())
    OptimiserStep(algo, StepConfig(grad_norm_clipping=1.5), total_steps=10).update(
        two_transitions()
    )
    assert numbers(algo.actor) == pytest.approx([0.5 + 0.01 * 1.5])
    assert numbers(algo.critic) == pytest.approx([1.075, 1.925])  # a norm of 1.06 is left alone


def test_what_is_replayed_does_not_count_as_collected() -> None:
    step = toy(total_steps=10)
    for env_steps in (1, 0, 2):
        rates = step.update(two_transitions(env_steps)).metrics
    counters = step.counters
    assert (counters.env_steps, counters.learnt_steps) == (3, 6)
    assert (counters.optimiser_steps, counters.version) == (3, 3)
    assert rates["critic_learning_rate"] == pytest.approx(CRITIC_RATE * (1 - 1 / 10))
    assert step.update(two_transitions()).metrics["actor_learning_rate"] == pytest.approx(
        ACTOR_RATE * 0.7
    )


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_restored_checkpoint_makes_the_identical_next_step() -> None:
    first, other = toy(momentum=0.9), toy(momentum=0.9)
    for _ in range(2):
        first.update(random_transitions())
    other.load_state_dict(saved_and_loaded(first.state_dict()))
    batch = random_transitions()
    assert first.update(batch).metrics == other.update(batch).metrics
    torch.testing.assert_close(other.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert other.counters == first.counters
    assert numbers(other.algo.target) != numbers(other.algo.critic), "the target lags behind"


def test_the_actor_is_under_the_key_of_all_checkpoints_and_the_rest_beside_it() -> None:
    state = toy().state_dict()
    assert list(state["model_state_dict"]) == ["w"]
    assert state["optimizer_state_dict"] == {}
    assert set(state["algorithm_state_dict"]["models"]) == {"critic", "target"}
    assert set(state["algorithm_state_dict"]["optimisers"]) == {"actor", "critic"}


@pytest.mark.parametrize(("missing", "kind"), [("target", "models"), ("critic", "optimisers")])
def test_a_checkpoint_of_another_algorithm_is_refused_and_changes_nothing(
    missing: str, kind: str
) -> None:
    step, other = toy(), toy()
    step.update(two_transitions())
    state = saved_and_loaded(step.state_dict())
    del state["algorithm_state_dict"][kind][missing]
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=rf"another algorithm: .* the {kind} .*Toy has"):
        other.load_state_dict(state)
    del state["algorithm_state_dict"]
    with pytest.raises(ValueError, match="the models actor, but Toy has actor, critic, target"):
        other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_an_optimiser_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    step, other = toy(momentum=0.9), toy(momentum=0.9)
    step.update(two_transitions())
    state = saved_and_loaded(step.state_dict())
    before = copy.deepcopy(other.state_dict())
    saved = state["algorithm_state_dict"]["optimisers"][name]
    saved["param_groups"][0]["params"] = [0, 1, 2]
    with pytest.raises(ValueError, match=f"optimiser {name} is different: it has 3 parameters"):
        other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_named_with_its_model_before_anything_moves() -> None:
    step = toy()
    step.algo.critic.v.register_hook(lambda gradient: gradient * math.inf)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(NonFiniteError, match=r"the gradient of critic\.v is not finite"):
        step.update(two_transitions())
    torch.testing.assert_close(step.state_dict(), before, rtol=0, atol=0)


class Delayed(Toy):
    """The actor learns from every second batch."""

    batches = 0

    def losses(self, minibatch: Transitions) -> Losses:
        terms, metrics, _ = super().losses(minibatch)
        self.batches += 1
        return Losses(
            terms if self.batches % 2 == 0 else {"critic_loss": terms["critic_loss"]}, metrics
        )


def test_an_optimiser_without_a_term_does_not_move() -> None:
    step = OptimiserStep(Delayed(LinearActor(), ToyConfig()), StepConfig(), total_steps=10)
    assert step.update(two_transitions()).metrics["actor_grad_norm"] == 0
    assert numbers(step.algo.actor) == [0.5]
    step.update(two_transitions())
    assert numbers(step.algo.actor) != [0.5]


def test_a_network_that_is_frozen_as_a_whole_stays_while_the_others_learn() -> None:
    """The actor's term depends on the critic too, which the actor's optimiser does not move."""
    step = toy()
    step.algo.actor.requires_grad_(False)
    metrics = step.update(two_transitions()).metrics
    assert metrics["actor_grad_norm"] == 0 and numbers(step.algo.actor) == [0.5]
    assert numbers(step.algo.critic) == pytest.approx([1.075, 1.925])


@pytest.mark.parametrize("other", ["none", "acter"])
def test_a_term_that_no_optimiser_minimises_is_an_error(other: str) -> None:
    terms = {"critic_loss": "critic"} | ({} if other == "none" else {"actor_loss": other})
    algo = type("Mine", (Toy,), {"minimised_by": terms})(LinearActor(), ToyConfig())
    step = OptimiserStep(algo, StepConfig(), total_steps=10)
    with pytest.raises(ValueError, match="no optimiser minimises actor_loss: name one of actor"):
        step.update(two_transitions())


@pytest.mark.parametrize("mistake", ["shared", "twice", "name", "none"])
def test_parts_that_do_not_work_together_are_refused_at_once(mistake: str) -> None:
    algo = Toy(LinearActor(), ToyConfig())
    if mistake == "shared":
        algo.optimisers["actor"] = torch.optim.SGD(algo.critic.parameters(), 0.1)
    elif mistake == "twice":
        both = [*algo.critic.parameters(), *algo.critic.parameters()]
        algo.optimisers = {"critic": Adam(both, lr=0.1)}
    elif mistake == "name":
        algo.models["values"] = algo.models.pop("critic")
    else:
        algo.optimisers = {}
    with pytest.raises(ValueError, match="same parameter twice|attribute 'values'|no optimiser"):
        OptimiserStep(algo, StepConfig(), total_steps=10)


def test_another_kind_of_network_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="IMPALA needs a network of type ActorCritic, got Linear"):
        impala(LinearActor())
    net = MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)
    with pytest.raises(UsageError, match="Toy needs a network of type LinearActor, got MLPNet"):
        Toy(net, ToyConfig())


def test_slices_of_transitions_are_the_transitions_and_collect_them_once() -> None:
    batch = dataclasses.replace(random_transitions(7), env_steps=5, episodes=((3.0, 2), (4.0, 9)))
    parts = batch.split(3)
    assert [part.batch_size for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat([part.reward for part in parts]), batch.reward)
    assert torch.equal(torch.cat([part.next_observation for part in parts]), batch.next_observation)
    assert sum(part.env_steps for part in parts) == 5
    assert sum(part.num_steps for part in parts) == batch.num_steps == 7
    assert batch.finished_episodes() == ([3.0, 4.0], [2, 9])
    assert batch.column_bytes == 8
