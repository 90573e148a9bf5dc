# SPDX-License-Identifier: Apache-2.0
"""RMSprop equals PyTorch's, bit for bit where that computes parameter by parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from torchbeast.core.algos.rmsprop import RMSprop

SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.01, "alpha": 0.9, "eps": 0.01},
    {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "momentum": 0.9},
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def steps(model: nn.Module, optimizer: Any, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_steps_equal_pytorchs(settings: dict[str, Any]) -> None:
    ours, theirs = network(), network()
    steps(ours, RMSprop(ours.parameters(), **settings), 20)
    steps(theirs, torch.optim.RMSprop(theirs.parameters(), **settings), 20)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_state_of_pytorchs_loads(settings: dict[str, Any]) -> None:
    theirs = network()
    optimizer = torch.optim.RMSprop(theirs.parameters(), **settings)
    steps(theirs, optimizer, 5)
    ours = copy.deepcopy(theirs)
    restored = RMSprop(ours.parameters(), **settings)
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


def test_a_parameter_without_a_gradient_stays() -> None:
    model = network()
    optimizer = RMSprop(model.parameters(), lr=0.1)
    frozen = model[0].weight.requires_grad_(False).clone()
    steps(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_gradients_are_forgotten_or_made_zero() -> None:
    model = network()
    optimizer = RMSprop(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None
