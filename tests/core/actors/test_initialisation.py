# SPDX-License-Identifier: Apache-2.0
"""NormedAtariNet starts so that it sees what moves and prefers no action."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.networks import NormedAtariNet
from torchbeast.core.envs.spaces import ArraySpec, Discrete

ACTIONS = 6
GAINS = {"policy": 0.01, "baseline": 1.0}


def net(use_lstm: bool = False) -> NormedAtariNet:
    return NormedAtariNet(ArraySpec((4, 84, 84), "uint8"), Discrete(ACTIONS), use_lstm)


def inputs(frames: Tensor) -> ModelInputs:
    """Frames [B, 4, 84, 84] as one step of B environments."""
    steps = 1, len(frames)
    nothing = torch.zeros(steps)
    return ModelInputs(frames[None], nothing, nothing.bool(), torch.zeros(steps, dtype=torch.int64))


def two_balls() -> Tensor:
    """A gray field with a ball of 2x2 here, and there."""
    frames = torch.full((2, 4, 84, 84), 87, dtype=torch.uint8)
    frames[0, :, 40:42, 30:32] = frames[1, :, 50:52, 44:46] = 236
    return frames


@pytest.mark.parametrize("use_lstm", [False, True])
def test_filters_are_at_right_angles_and_as_long_as_their_gain(use_lstm: bool) -> None:
    layers = {
        name: layer
        for name, layer in net(use_lstm).named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    assert set(layers) == {"conv1", "conv2", "conv3", "fc", "policy", "baseline"}
    for name, layer in layers.items():
        rows = layer.weight.detach().flatten(1)
        expected = GAINS.get(name, 2**0.5) ** 2 * torch.eye(len(rows))
        torch.testing.assert_close(rows @ rows.T, expected, rtol=0, atol=1e-5, msg=name)
        assert layer.bias is not None and not layer.bias.any()


def test_at_the_start_every_action_is_about_as_likely() -> None:
    with torch.no_grad():
        output = net()(inputs(two_balls()), ())
    chances = output.policy_logits.softmax(-1)
    torch.testing.assert_close(chances, torch.full_like(chances, 1 / ACTIONS), rtol=0.1, atol=0)


def distance(model: NormedAtariNet) -> float:
    """Between the features of the two frames."""
    with torch.no_grad():
        here, there = model._run(inputs(two_balls()), (), model)[0][0]
    return (here - there).norm().item()


def test_a_ball_moves_the_features_far_more_than_with_pytorchs_own_start() -> None:
    torch.manual_seed(0)
    ours, plain = net(), net()
    for layer in plain.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    assert distance(ours) > 5 * distance(plain) > 0
