# SPDX-License-Identifier: Apache-2.0
"""RMSprop, Adam and AdamW equal PyTorch's to the last digits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from torchbeast.core.algos.config import OptimiserConfig
from torchbeast.core.algos.optimisers import Adam, RMSprop

PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (RMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 0.01}),
    (RMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "momentum": 0.9}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "eps": 1e-5}),
    (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}),
    (Adam, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
]
MADE = pytest.mark.parametrize(
    "make", [lambda ps: RMSprop(ps, lr=0.1), lambda ps: Adam(ps, lr=0.1)], ids=["rmsprop", "adam"]
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def steps(model: nn.Module, optimizer: Any, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("own", "torchs", "settings"), PAIRS)
def test_twenty_steps_equal_pytorchs(own: Any, torchs: Any, settings: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    steps(ours, own(ours.parameters(), **settings), 20)
    steps(theirs, torchs(theirs.parameters(), **settings), 20)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("own", "torchs", "settings"), PAIRS)
def test_the_state_of_pytorchs_loads(own: Any, torchs: Any, settings: dict[str, Any]) -> None:
    theirs = network()
    optimizer = torchs(theirs.parameters(), **settings)
    steps(theirs, optimizer, 5)
    ours = copy.deepcopy(theirs)
    restored = own(ours.parameters(), **settings)
    restored.load_state_dict(optimizer.state_dict())
    steps(theirs, optimizer, 5, first=5)
    steps(ours, restored, 5, first=5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_restored_state_is_a_copy_and_the_settings_stay() -> None:
    model = network()
    first = RMSprop(model.parameters(), lr=0.5)
    steps(model, first, 3)
    second = RMSprop(model.parameters(), lr=0.1, momentum=0.9)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.1
    before = second.state_dict()["state"][0]["square_avg"].clone()
    steps(model, first, 1)
    assert torch.equal(second.state_dict()["state"][0]["square_avg"], before)
    assert not second.state_dict()["state"][0]["momentum_buffer"].any()


@MADE
def test_a_parameter_without_a_gradient_stays(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    frozen = model[0].weight.requires_grad_(False).clone()
    steps(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@MADE
def test_gradients_are_forgotten(make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_adam_counts_the_steps_of_each_parameter_by_itself() -> None:
    """A parameter that first gets a gradient in the third step moves by the learning rate then."""
    early, late = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimiser = Adam([early, late], lr=0.5, eps=1e-12)
    for step in range(3):
        early.grad = torch.tensor([2.0])
        late.grad = torch.tensor([-3.0]) if step == 2 else None
        optimiser.step()
    assert early.item() == pytest.approx(-1.5) and late.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"momentum": 0.5}, RMSprop, {"alpha": 0.99, "momentum": 0.5}),
        ({"optimiser": "adam", "beta2": 0.9}, Adam, {"betas": (0.9, 0.9), "weight_decay": 0.0}),
        ({"optimiser": "adamw", "weight_decay": 0.1}, Adam, {"weight_decay": 0.1}),
    ],
)
def test_the_settings_choose_the_optimiser(
    settings: dict[str, Any], kind: type, expected: dict[str, Any]
) -> None:
    config = OptimiserConfig(learning_rate=0.3, epsilon=0.2, **settings)
    made = config.make(network().parameters())
    (group,) = made.param_groups
    assert type(made) is kind and (group["lr"], group["eps"]) == (0.3, 0.2)
    assert expected.items() <= group.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser": "sgd"}, "optimiser must be one of rmsprop, adam, adamw, got 'sgd'"),
        ({"optimiser": "adam", "momentum": 0.9}, "momentum 0.9 needs optimiser rmsprop, got adam"),
        ({"optimiser": "adam", "weight_decay": 0.1}, "weight_decay 0.1 needs optimiser adamw"),
        ({"beta1": 1.0}, "beta1 must be at least 0 and below 1, got 1.0"),
        ({"beta2": -0.1}, "beta2 must be at least 0 and below 1, got -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
    ],
)
def test_settings_that_contradict_the_optimiser_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimiserConfig(**settings)


def test_a_gradient_in_another_memory_layout_moves_its_parameter_as_pytorchs() -> None:
    ours, theirs = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    gradient = torch.tensor([[1.0, -1.0], [2.0, -2.0], [-3.0, 3.0]]).T
    ours.grad, theirs.grad = gradient, gradient
    Adam([ours], lr=0.1).step()
    torch.optim.Adam([theirs], lr=0.1).step()
    torch.testing.assert_close(ours, theirs)


@MADE
def test_the_state_is_where_a_parameter_is_in_its_first_step(make: Any) -> None:
    """A program moves the networks of an algorithm after their optimisers are made."""
    model = network()
    optimizer = make(model.parameters())
    model.double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert {state[name].dtype for name in state.keys() - {"step"}} == {torch.float64}
