# SPDX-License-Identifier: Apache-2.0
"""Masked policies against policies over the allowed actions alone, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchbeast.core.actors.contract import ActionMask, ActorCritic, ModelInputs
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.registry import make_model
from torchbeast.core.algos.laser import implied_policy_kl
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete, MultiDiscrete
from torchbeast.errors import RunError

T, B = 3, 2
ALLOWED = [0, 2]  # of four actions
MASK = torch.tensor([1, 0, 1, 0], dtype=torch.int8)
NUMBERS = ArraySpec((3,), "float32", -1, 1)


def seen(size: int) -> dict[str, Any]:
    """Returns a space of observations that mask `size` choices."""
    return {"numbers": NUMBERS, "action_mask": ArraySpec((size,), "int8", 0, 1)}


def masked(logits: Tensor) -> Tensor:
    rows = MASK.expand(*logits.shape[:-1], 4)
    return ActionMask((4,)).masked(logits, {"action_mask": rows})


def test_a_masked_policy_is_the_policy_over_the_allowed_actions_alone() -> None:
    """Probabilities, entropy and KL, and the gradients of the last two."""
    ours, few = distribution_for(Discrete(4)), distribution_for(Discrete(2))
    p, q = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    alone_p, alone_q = p[:, ALLOWED], q[:, ALLOWED]
    log_probs = ours.all_log_probs(masked(p))
    torch.testing.assert_close(log_probs[:, ALLOWED], few.all_log_probs(alone_p))
    assert log_probs.exp()[:, [1, 3]].eq(0.0).all()
    pairs = [
        (ours.entropy(masked(p)), few.entropy(alone_p)),
        (ours.kl(masked(p), masked(q)), few.kl(alone_p, alone_q)),
        (ours.log_prob(masked(p), torch.full((5,), 2)), few.log_prob(alone_p, torch.ones(5))),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)
        gradients = (
            torch.autograd.grad(x.sum(), p, retain_graph=True)[0] for x in (found, expected)
        )
        torch.testing.assert_close(*gradients)


def test_the_relevance_of_a_masked_policy_is_that_of_the_allowed_actions_alone() -> None:
    p, q = torch.randn(5, 4), 3 * torch.randn(5, 4)
    found = implied_policy_kl(masked(p).log_softmax(-1), masked(q).log_softmax(-1))
    expected = implied_policy_kl(p[:, ALLOWED].log_softmax(-1), q[:, ALLOWED].log_softmax(-1))
    torch.testing.assert_close(found, expected)


def test_uniform_logits_become_one_half_each_of_two_allowed_actions() -> None:
    """By hand: entropy log 2, and the gradient of log pi(0) is 1 - 1/2 and -1/2."""
    logits = torch.zeros(1, 4, requires_grad=True)
    actions = distribution_for(Discrete(4))
    assert masked(logits).softmax(-1).tolist() == [[0.5, 0.0, 0.5, 0.0]]
    torch.testing.assert_close(actions.entropy(masked(logits)), torch.tensor([2.0]).log())
    actions.log_prob(masked(logits), torch.tensor([0])).backward()
    assert logits.grad is not None and logits.grad.tolist() == [[0.5, 0.0, -0.5, 0.0]]


def model_for(size: int, actions: Any, name: str = "mlp") -> Any:
    torch.manual_seed(0)
    return make_model(ActorSpec(name), seen(size), actions)


def inputs_with(mask: Tensor, action: Tensor) -> ModelInputs:
    rows, columns = mask.shape[:2]
    observation = {"numbers": torch.randn(rows, columns, 3), "action_mask": mask}
    done = torch.zeros(rows, columns, dtype=torch.bool)
    return ModelInputs(observation, torch.zeros(rows, columns), done, action)


@pytest.mark.parametrize("mode", ["sample", "greedy", "explore"])
def test_every_choice_of_a_multidiscrete_obeys_its_part_of_the_mask(mode: Any) -> None:
    model = model_for(5, MultiDiscrete((2, 3)))
    mask = torch.tensor([0, 1, 1, 0, 0], dtype=torch.int8).expand(1, 200, 5)
    acted = model.act(inputs_with(mask, torch.zeros(1, 200, 2).long()), (), mode)
    assert acted.action.eq(torch.tensor([1, 0])).all()
    assert acted.extras["policy_logits"].isneginf().eq(mask == 0).all()


def test_a_mask_may_have_a_row_for_each_of_several_choices() -> None:
    model = make_model(
        ActorSpec("mlp"),
        {"numbers": NUMBERS, "action_mask": ArraySpec((2, 3), "int8", 0, 1)},
        Box(5, 7, (2,), "int32"),
    )
    mask = torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.int8).expand(1, 200, 2, 3)
    acted = model.act(inputs_with(mask, torch.full((1, 200, 2), 5)), (), "sample")
    assert acted.action.eq(torch.tensor([6, 7])).all()


@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (4, 3)])
def test_a_mask_of_joint_actions_is_refused_and_can_be_left_out(shape: tuple[int, int]) -> None:
    """(2, 2) may be one too."""
    space = {"numbers": NUMBERS, "action_mask": ArraySpec(shape, "int8", 0, 1)}
    with pytest.raises(ValueError, match=r"got \(.*leave the mask out with observation_keys numb"):
        make_model(ActorSpec("mlp"), space, MultiDiscrete(shape))


def test_acting_and_learning_see_the_same_masked_policy() -> None:
    model = model_for(4, Discrete(4))
    inputs = inputs_with(torch.randint(0, 2, (T, B, 4)) | MASK, torch.zeros(T, B).long())
    assert isinstance(model, ActorCritic)
    learnt = model(inputs, ())
    for t in range(T):
        observation = {name: leaf[t : t + 1] for name, leaf in inputs.observation.items()}
        row = ModelInputs(observation, *(leaf[t : t + 1] for leaf in inputs[1:]))
        acted = model.act(row, (), "sample")
        torch.testing.assert_close(acted.extras["policy_logits"], learnt.policy_logits[t : t + 1])
    assert learnt.policy_logits.isneginf().eq(inputs.observation["action_mask"] == 0).all()


@pytest.mark.parametrize("mask", [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], ids=["all", "one choice"])
def test_a_mask_that_leaves_no_action_is_an_error_that_says_so(mask: list[int]) -> None:
    model = model_for(5, MultiDiscrete((2, 3)))
    rows = torch.tensor([[[1, 1, 1, 1, 1], mask]])
    with pytest.raises(RunError, match="action_mask of an environment forbids every action"):
        model.act(inputs_with(rows, torch.zeros(1, 2, 2).long()), (), "greedy")


def test_a_part_without_a_choice_is_left_unmasked_alone() -> None:
    mask = torch.tensor([[0, 0, 1, 0, 1, 1]])
    allowed = ActionMask((2, 4)).masked(torch.zeros(1, 6), {"action_mask": mask}).isfinite()
    assert allowed.tolist() == [[True, True, True, False, True, True]]


def test_masks_that_would_not_be_obeyed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(5,\)"):
        model_for(5, Discrete(4))
    with pytest.raises(ValueError, match="Discrete or MultiDiscrete .* Gaussian"):
        model_for(4, Box(-1, 1, (2,)))
    with pytest.raises(ValueError, match="would ignore: make it a subclass of ActorCritic or Off"):
        model_for(4, Discrete(4), "masked:Blind")
