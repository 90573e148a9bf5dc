# SPDX-License-Identifier: Apache-2.0
"""The plain network of the benchmarks computes what NormedAtariNet does, only slower."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.networks import NormedAtariNet
from torchbeast.core.envs.spaces import ArraySpec, Discrete

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FRAMES, ACTIONS = ArraySpec((4, 84, 84), "uint8"), Discrete(6)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plain = importlib.import_module("plain_net").PlainAtariNet
    models = []
    for make in (NormedAtariNet, plain):
        torch.manual_seed(1)
        models.append(make(FRAMES, ACTIONS, False))
    return models


def inputs() -> ModelInputs:
    frames = torch.randint(256, (2, 3, *FRAMES.shape), dtype=torch.uint8)
    frames[0, 0] = 100  # plain: nothing is divided by 0
    frames[1, 1] = 100 + frames[1, 1] % 2  # of little contrast
    return ModelInputs(
        observation=frames,
        reward=torch.randn(2, 3),
        done=torch.zeros(2, 3, dtype=torch.bool),
        last_action=torch.randint(6, (2, 3)),
    )


def test_both_start_with_the_same_weights(both: list[nn.Module]) -> None:
    fast, plain = (model.state_dict() for model in both)
    assert list(fast) == list(plain)
    assert all(torch.equal(fast[name], plain[name]) for name in fast)


def test_both_compute_the_same_and_have_the_same_gradients(both: list[nn.Module]) -> None:
    seen, gradients = inputs(), []
    for model in both:
        output = model(seen, ())
        loss = output.policy_logits.square().sum() + output.baseline.square().sum()
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    fast, plain = gradients
    for got, wanted in zip(fast, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
